"""The external solvers that read MPS files, for the tests of reading and writing them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

MpsSolvers = Callable[[Sequence[Path]], Mapping[str, list[float]]]

_HIGHS = """
import json, sys
import highspy
answers = []
for path in json.loads(sys.argv[1]):
    highs = highspy.Highs()
    for name, value in (
        ("output_flag", False), ("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 0.0),
        ("primal_feasibility_tolerance", 1e-9), ("mip_feasibility_tolerance", 1e-9),
    ):
        assert highs.setOptionValue(name, value) == highspy.HighsStatus.kOk, name
    assert highs.readModel(path) == highspy.HighsStatus.kOk, path
    highs.run()
    for style, suffix in ((0, "highs"), (1, "pretty"), (4, "sparse")):
        highs.writeSolution(f"{path}.{suffix}.sol", style)
    answers.append(highs.getInfo().objective_function_value)
sys.stdout.write(json.dumps(answers))
"""
_SCIP = """
import json, sys
from pyscipopt import Model
answers = []
for path in json.loads(sys.argv[1]):
    model = Model()
    model.hideOutput()
    model.setParam("numerics/feastol", 1e-9)
    model.setParam("numerics/dualfeastol", 1e-9)
    model.readProblem(path)
    model.optimize()
    model.writeBestSol(f"{path}.scip.sol")
    answers.append(model.getPrimalbound())
sys.stdout.write(json.dumps(answers))
"""
_CBC_PATH = "import sys, pulp; sys.stdout.write(pulp.PULP_CBC_CMD().path)"


def run_python(code: str, *arguments: str) -> str:
    """The last line that the code prints; the solvers may print a banner before it."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def run_cbc(cbc: str, path: Path) -> float:
    command = [cbc, str(path), "-ratioGap", "0", "-allowableGap", "0", "-primalTolerance", "1e-9"]
    command += ["-solve", "-solution", f"{path}.cbc.sol"]
    command += ["-printingOptions", "all", "-solution", f"{path}.cbc-all.sol"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read with 0 errors" in done.stdout
    with Path(f"{path}.cbc.sol").open() as stream:
        return float(stream.readline().rsplit(maxsplit=1)[-1])


@pytest.fixture(scope="session")
def mps_solvers() -> MpsSolvers:
    """Solve MPS files with HiGHS, SCIP and CBC, each in a process of its own.

    Loaded before MathOpt's HiGHS, highspy and PuLP can crash the process
    (google/or-tools#5246). Beside each file stand its solutions, `<file>.<style>.sol` with the
    styles highs, pretty, sparse, scip, cbc and cbc-all. PuLP's CBC reads no packed files and
    is left out for them.
    """
    cbc = run_python(_CBC_PATH)

    def solve(paths: Sequence[Path]) -> Mapping[str, list[float]]:
        names = json.dumps([str(path) for path in paths])
        found = {
            "highs": json.loads(run_python(_HIGHS, names)),
            "scip": json.loads(run_python(_SCIP, names)),
        }
        if not any(path.suffix == ".gz" for path in paths):
            found["cbc"] = [run_cbc(cbc, path) for path in paths]
        return found

    return solve
