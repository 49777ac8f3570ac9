"""A run beside its prediction: kept with the costs, and told with every later prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsync_opt import cli
from qsync_opt.build import build_problem
from qsync_opt.calibration import HeldOutRun, median_error, plan_digest, with_run
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.errors import CostsError, FormatError, ParameterError
from qsync_opt.files import load_costs, save_costs, save_graph, save_plan, save_problem
from qsync_opt.graph import OperatorGraph
from qsync_opt.hosts import calibrate, host_costs
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan
from qsync_opt.runtime.metrics import MetricsFile, StepMetrics
from qsync_opt.simulate.replay import replay
from tests.cost_cases import made_up_costs, made_up_table
from tests.unit.measure.nets import capture_chain
from tests.unit.test_cost_commands import refused, run

KINDS = ("strong", "weak")


class Job:
    """A graph, costs of two kinds, their problem and a plan; and the same as files."""

    def __init__(self, folder: Path) -> None:
        self.graph: OperatorGraph = capture_chain()
        self.costs: dict[str, DeviceCosts] = {
            name: made_up_costs(self.graph, seed) for seed, name in enumerate(KINDS)
        }
        self.problem: AllocationProblem = build_problem(
            self.graph,
            self.costs,
            made_up_table(self.graph),
            Cluster(kinds=tuple(ClusterKind(name=name) for name in KINDS)),
            slack=0.3,
        )
        self.plan: PrecisionPlan = solve(self.problem).require_plan()
        self.files = {name: folder / f"{name}.json" for name in KINDS}
        for name, path in self.files.items():
            save_costs(self.costs[name], path)
        self.paths = folder / "problem.json", folder / "plan.json", folder / "graph.json"
        save_problem(self.problem, self.paths[0])
        save_plan(self.plan, self.paths[1])
        save_graph(self.graph, self.paths[2])

    @property
    def words(self) -> list[str]:
        kinds = [word for name, path in self.files.items() for word in ("--kind", f"{name}={path}")]
        return [*map(str, self.paths[:2]), "--graph", str(self.paths[2]), *kinds]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def held_out(plan: str = "a", ratio: float = 1.1) -> HeldOutRun:
    return HeldOutRun(plan=plan, ranks=1, predicted_s=ratio, measured_s=1.0, date="2026-01-01")


def test_the_largest_error_counts_and_a_plan_counts_once() -> None:
    runs: tuple[HeldOutRun, ...] = ()
    for name, ratio in (("a", 1.5), ("b", 0.8), ("a", 1.1), ("c", 0.95)):
        runs = with_run(runs, held_out(name, ratio))
    assert [run.plan for run in runs] == ["b", "a", "c"]
    costs = replace(made_up_costs(capture_chain()), held_out=runs)
    assert costs.error == pytest.approx(1 / 0.8 - 1)
    assert median_error(runs) == pytest.approx(1 - 1 / 1.1)
    assert costs.error is not None
    for kept in runs:  # the band around each prediction holds what was measured
        assert abs(kept.measured_s - kept.predicted_s) <= costs.error * kept.predicted_s
    assert made_up_costs(capture_chain()).error is None
    assert median_error(()) is None


def test_a_run_is_known_by_precisions_and_bits(job: Job) -> None:
    plan = job.plan
    other = replace(plan, problem="0" * 64)
    sent = [replace(plan, communication=bits) for bits in ((8, 16), (16, 8))]
    assert plan_digest(plan) == plan_digest(other)
    assert len({plan_digest(row) for row in (plan, *sent)}) == 3


def test_runs_are_kept_in_the_file_and_files_without_them_are_read(job: Job) -> None:
    path = job.files["weak"]
    before = path.read_bytes()
    assert b"held_out" not in before  # what earlier releases wrote, byte for byte
    assert load_costs(path).held_out == ()
    costs = replace(job.costs["weak"], held_out=(held_out("a"), held_out("b", 0.9)))
    save_costs(costs, path)
    assert load_costs(path).held_out == costs.held_out
    save_costs(replace(load_costs(path), held_out=()), path)
    assert path.read_bytes() == before
    document = json.loads(before)
    document["held_out"] = [{"plan": "a", "ranks": 1, "predicted_s": 1.0}]
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"held_out\[0\].*measured_s"):
        load_costs(path)


def test_every_later_prediction_carries_the_error(job: Job) -> None:
    before = replay(job.problem, job.plan).iteration_time_s
    once = calibrate(
        job.problem, job.plan, before / 1.04, graph=job.graph, costs={"weak": job.costs["weak"]}
    )
    (run,) = once["weak"].held_out
    assert run.plan == plan_digest(job.plan)
    assert run.ranks == 2
    assert run.error == pytest.approx(0.04)
    hosts = {
        name: host_costs(job.graph, row, job.problem.precisions)
        for name, row in {**job.costs, **once}.items()
    }
    assert hosts["strong"].error is None
    assert replay(job.problem, job.plan, hosts=hosts).error == pytest.approx(1 - 1 / 1.04)
    again = calibrate(job.problem, job.plan, before / 0.97, graph=job.graph, costs=once)
    assert again["weak"].error == pytest.approx(1 / 0.97 - 1)  # the same plan, run again


def test_from_a_measured_time_to_the_error_in_the_table(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run(capsys, "replay", *job.words)
    assert shown["error"] is None
    predicted = float(str(shown["iteration_time_s"]))
    told = run(capsys, "calibrate", *job.words, "--measured", predicted * 1.25)
    assert told["predicted_s"] == predicted
    assert told["error"] == pytest.approx(-0.2)
    assert run(capsys, "replay", *job.words)["error"] == pytest.approx(0.25)
    assert cli.main(["replay", *job.words]) == 0
    assert "± 25 %" in capsys.readouterr().out
    assert cli.main(["calibrate", *job.words, "--measured", str(predicted)]) == 0
    assert "weak: ± 0 % of 1 run(s)" in capsys.readouterr().out


def test_a_training_run_is_read_from_its_metrics(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = float(str(run(capsys, "replay", *job.words)["iteration_time_s"]))
    for rank, factor in enumerate((1.0, 0.5)):
        file = MetricsFile(tmp_path, rank, 0)
        for step in range(8):
            file.write(
                StepMetrics(
                    step=step,
                    rank=rank,
                    kind=KINDS[rank],
                    loss=1.0,
                    samples=1,
                    step_s=predicted * factor * (100.0 if step < 3 else 2.0),
                    compute_s=0.0,
                    wait_s=0.0,
                    memory_bytes=0,
                    loss_scale=1.0,
                    skipped=False,
                )
            )
        file.close()
    told = run(capsys, "calibrate", *job.words, "--metrics", tmp_path)
    assert told["measured_s"] == pytest.approx(2 * predicted)
    assert told["error"] == pytest.approx(-0.5)
    first = tmp_path / "rank-0.jsonl"
    kept = first.read_text()
    first.write_text("")
    assert "--metrics: must hold" in refused(capsys, "calibrate", *job.words, "--metrics", tmp_path)
    (tmp_path / "rank-2.jsonl").write_text(kept)
    first.write_text(kept)
    text = refused(capsys, "calibrate", *job.words, "--metrics", tmp_path)
    assert "ranks of the problem (strong x 1, weak x 1), got 'strong x 2, weak x 1'" in text
    text = refused(capsys, "calibrate", *job.words, "--metrics", tmp_path / "nowhere")
    assert "--metrics: must be a folder" in text
    words = [word.replace("weak.json", "strong.json") for word in job.words]
    text = refused(capsys, "calibrate", *words, "--measured", 1.0)
    assert "--kind: must name a file of its own" in text


def test_solve_heeds_hosts_on_the_command_line(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "solve", job.paths[0])["replayed"] is None
    words = [str(job.paths[0]), *job.words[2:]]
    free: dict[str, Any] = run(capsys, "solve", *words)
    assert free["replayed"]["cuts"] == 0
    table = np.where(job.costs["weak"].operators.available, 1e-3, np.nan)
    slow = replace(job.costs["weak"].operators, forward_host_s=table)
    save_costs(replace(job.costs["weak"], operators=slow), job.files["weak"])
    held: dict[str, Any] = run(capsys, "solve", *words)
    told = held["replayed"]
    assert told["iteration_time_s"] >= 1e-3 * len(job.graph.operators)
    assert told["iteration_time_s"] <= held["deadline_s"] * (1 + 1e-8)
    assert cli.main(["solve", *words, "--waits"]) == 0
    assert "the sum alone is off by" in capsys.readouterr().out


def test_bad_input_is_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParameterError, match="measured_s"):
        calibrate(job.problem, job.plan, 0.0, graph=job.graph, costs=job.costs)
    with pytest.raises(ParameterError, match="costs"):
        calibrate(job.problem, job.plan, 1.0, graph=job.graph, costs={})
    with pytest.raises(CostsError, match="predicted_s"):
        held_out(ratio=float("nan"))
    words = ["calibrate", *job.words]
    assert "--measured" in refused(capsys, *words)
    assert "--measured: must be" in refused(capsys, *words, "--measured", "-1")
    assert "--kind: must name each" in refused(
        capsys, *words, "--measured", 1, "--kind", f"weak={job.files['weak']}"
    )
    assert "--kind: must be given" in refused(
        capsys, "calibrate", *job.paths[:2], "--measured", "1"
    )
    assert "--kind: must be given with --waits" in refused(
        capsys, "replay", *job.paths[:2], "--waits"
    )
