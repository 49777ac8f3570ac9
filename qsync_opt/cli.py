"""The command line `qsync-opt`: options, exit codes, one-line errors.

Exit codes:
    0    a plan was found (evaluate, explain: the plan, or the problem, is feasible)
    1    infeasible, or no plan was found; training came to an early end
    2    bad input or usage; nothing was written half-way
    130  interrupted; a solve prints the best plan found so far first, training saves first
    141  the reader of standard output went away

Results go to standard output (with `--json` as one JSON object and nothing else), progress
and errors to standard error. What a command needs is imported when it runs, so `--help` and
usage errors are instant.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from qsync_opt import (
    __version__,
    commands,
    cost_commands,
    model_commands,
    replay_commands,
    train_commands,
)
from qsync_opt.commands import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_NO_PLAN,
    EXIT_PIPE_CLOSED,
)
from qsync_opt.errors import (
    InfeasibleError,
    ParameterError,
    QsyncError,
    SolverUnavailableError,
    TrainError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The same lists as in `optimize.result`, which takes a while to import; a test compares them.
METHODS = ("auto", "exact", "greedy", "uniform", "fastest", "random", "brute_force")
SOLVERS = ("highs", "scip", "cp_sat", "cbc")

#: The same list as in `measure.sensitivity`; a test compares them.
INDICATORS = (
    "variance",
    "variance_published",
    "measured",
    "hessian",
    "loss",
    "divergence",
    "random",
)

_DEFAULT_SLACKS = "0,0.02,0.05,0.1,0.2,0.5"
#: What the library calls a parameter -> what the user typed.
_OPTION_OF = {
    "time_limit_s": "--time-limit",
    "relative_gap": "--gap",
    "deadline_s": "--deadline",
    "base_plan": "--base-plan",
    "batch_size": "--batch-size",
    "learning_rate": "--learning-rate",
    "checkpoint_interval": "--checkpoint-interval",
    "folder": "--output",
    "timeout_s": "--timeout",
    **{
        name: f"--{name}"
        for name in (
            "accumulation",
            "autocast",
            "batches",
            "buckets",
            "costs",
            "device",
            "devices",
            "draws",
            "graph",
            "keep",
            "kind",
            "method",
            "methods",
            "operators",
            "optimizer",
            "plan",
            "plot",
            "precisions",
            "ranks",
            "seed",
            "set",
            "shares",
            "slack",
            "slacks",
            "solution",
            "solver",
            "steps",
            "threads",
            "tightness",
            "uniform",
        )
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see the module)."""
    if sys.stdout is None:  # closed by the caller: there is nobody to write to
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            arguments = parser().parse_args(argv)
            arguments.words = sys.argv[1:] if argv is None else list(argv)
            code = int(arguments.run(arguments))
        except SystemExit as stop:  # argparse has written what there is to say
            code = stop.code if isinstance(stop.code, int) else EXIT_BAD_INPUT
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _abandon_stdout()
        return EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except (InfeasibleError, SolverUnavailableError, TrainError) as error:
        return _fail(str(error), EXIT_NO_PLAN)
    except ParameterError as error:
        text = str(error)
        if error.field in _OPTION_OF:
            text = _OPTION_OF[error.field] + text.removeprefix(error.field)
        return _fail(text, EXIT_BAD_INPUT)
    except QsyncError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except OSError as error:
        _abandon_stdout()
        where = error.filename if error.filename is not None else "standard output"
        return _fail(f"{where}: {error.strerror or error}", EXIT_BAD_INPUT)
    except MemoryError:
        return _fail("not enough memory for a problem of this size", EXIT_BAD_INPUT)


def _fail(message: str, code: int) -> int:
    """One line on standard error, whatever the message holds."""
    from qsync_opt.console import one_line

    if sys.stderr is not None:
        try:
            sys.stderr.write(f"qsync-opt: {one_line(message)}\n")
        except OSError:
            return code  # nobody reads the message; the exit code still tells
    return code


def _abandon_stdout() -> None:
    """Drop what is still buffered, so that the interpreter does not fail on it at exit."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file: nothing is flushed at exit
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


# --- the options ------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        from qsync_opt.console import one_line

        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {one_line(message)} (see {self.prog} --help)\n")


def _limit(text: str) -> float | None:
    return None if text == "none" else _number(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _methods(text: str) -> tuple[str, ...]:
    words = tuple(part.strip() for part in text.split(","))
    unknown = [word for word in words if word not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"must be of {', '.join(METHODS)}, separated by commas, got {unknown[0]!r}"
        )
    return words


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = _Parser(
        prog="qsync-opt",
        description="Choose a precision for every operator of a network on every device kind.",
        epilog="Exit codes: 0 plan found, 1 infeasible or no plan found, 2 bad input or usage,"
        " 130 interrupted.",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"qsync-opt {__version__}")
    subparsers = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="write one JSON object, nothing else")
        return sub

    sub = command(
        "capture", model_commands.run_capture, "record one training step of a model as a graph"
    )
    sub.add_argument("model", metavar="MODEL", help="Python file with build()")
    sub.add_argument("--output", "-o", metavar="GRAPH", required=True, help="graph file to write")
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of build(), for example batch_size=32; can be repeated",
    )
    sub.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )

    sub = command(
        "perturb",
        model_commands.run_perturb,
        "what every operator at every precision adds to the variance of the gradient",
    )
    sub.add_argument("model", metavar="MODEL", help="Python file with build()")
    sub.add_argument("graph", metavar="GRAPH", help="graph file captured from it")
    sub.add_argument(
        "--output", "-o", metavar="TABLE", required=True, help="perturbation file to write"
    )
    sub.add_argument(
        "--method", choices=INDICATORS, default=INDICATORS[0], help="default: %(default)s"
    )
    sub.add_argument(
        "--precisions",
        type=_words,
        default=("fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
        metavar="A,B,...",
        help="columns of the table; default: all",
    )
    sub.add_argument(
        "--batches", type=int, default=1, metavar="N", help="mean over N; default: %(default)s"
    )
    sub.add_argument("--draws", type=int, metavar="N", help="random draws a batch")
    sub.add_argument(
        "--rounding",
        choices=("nearest", "stochastic"),
        default="nearest",
        help="of 8-bit operands; default: %(default)s",
    )
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of build(), for example a smaller batch_size; default: as captured",
    )
    sub.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )

    _measure_options(
        command("measure", cost_commands.run_measure, "measure what a graph costs on this device")
    )
    _build_options(
        command("build", cost_commands.run_build, "make a problem of measured costs and a cluster")
    )

    sub = command(
        "solve", commands.run_solve, "find the plan of least perturbation that keeps the pace"
    )
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("--method", choices=METHODS, default="auto", help="default: %(default)s")
    sub.add_argument("--hint", metavar="PLAN", help="plan file to start from")
    sub.add_argument("--output", "-o", metavar="PLAN", help="write the plan to this file")
    _pace_options(sub)
    _solver_options(sub)

    sub = command("evaluate", commands.run_evaluate, "what a plan costs, and the rules it breaks")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("plan", metavar="PLAN", help="plan file")
    sub.add_argument("--deadline", type=_number, metavar="S", help="iteration time to keep (s)")

    sub = command(
        "replay", replay_commands.run_replay, "what every rank does in a step, as table and trace"
    )
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("plan", metavar="PLAN", help="plan file")
    sub.add_argument("--trace", metavar="FILE", help="write a Chrome trace (.json or .json.gz)")
    sub.add_argument("--against", metavar="FILE", help="compare with a measured Chrome trace")
    sub.add_argument(
        "--rank", type=int, default=0, metavar="N", help="with --against; default: %(default)s"
    )
    sub.add_argument("--graph", metavar="GRAPH", help="with --kind: the graph that was measured")
    sub.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="NAME=COSTS",
        help="costs file of a device kind, for what its host takes to launch; can be repeated",
    )

    sub = command(
        "train",
        train_commands.run_train,
        "train a model with a plan; under torchrun as one rank of a job",
    )
    _train_options(sub)

    sub = command("compare", commands.run_compare, "several methods side by side")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    _methods_option(sub)
    _pace_options(sub)
    _solver_options(sub)

    sub = command("pareto", commands.run_pareto, "perturbation against iteration time")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    _slacks_option(sub)
    _methods_option(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw the curve (.png, .svg or .pdf)")
    sub.add_argument("--csv", metavar="FILE", help="write the points as CSV")
    _solver_options(sub)

    sub = command(
        "explain", commands.run_explain, "which budget of a problem is too small, and by how much"
    )
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    _pace_options(sub)

    sub = command(
        "export", commands.run_export, "write a problem as MPS, or read a solution of it back"
    )
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("mps", metavar="MPS", help="MPS file to write (.mps or .mps.gz)")
    sub.add_argument("--device", metavar="KIND", help="one device kind only; default: joint")
    sub.add_argument(
        "--solution",
        metavar="FILE",
        help="solution file of HiGHS, SCIP or CBC for MPS; MPS is read instead of written",
    )
    sub.add_argument("--plan", metavar="PLAN", help="with --solution: the plan file to write")
    sub.add_argument(
        "--base-plan", metavar="PLAN", help="with --solution of one kind: plan of the other kinds"
    )
    _pace_options(sub)

    sub = command("generate", commands.run_generate, "write a seeded random problem")
    sub.add_argument("output", metavar="OUT", help="problem file to write (.json or .json.gz)")
    for name, default, text in (
        ("operators", 300, "operators"),
        ("precisions", 4, "precisions, 1 to 6"),
        ("devices", 2, "device kinds"),
        ("buckets", 8, "gradient buckets"),
        ("seed", 0, "seed of the random numbers"),
    ):
        sub.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    sub.add_argument(
        "--tightness",
        type=_number,
        default=0.3,
        metavar="X",
        help="0: budgets leave no room, 1: they never bind; default: %(default)s",
    )
    sub.add_argument("--graph", default="branching", help="branching (default) or chain")
    sub.add_argument(
        "--costs", default="independent", help="independent (default), correlated or inverse"
    )

    sub = command(
        "demo", commands.run_demo, "compare methods, draw the Pareto curve and write the MPS"
    )
    sub.add_argument("problem", metavar="PROBLEM", nargs="?", help="problem file")
    sub.add_argument(
        "--output", "-o", metavar="FOLDER", default="demo-output", help="default: %(default)s"
    )
    _slacks_option(sub)
    _solver_options(sub)
    return whole


def _measure_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("graph", metavar="GRAPH", help="graph file")
    sub.add_argument("--output", "-o", metavar="COSTS", required=True, help="costs file to write")
    model = sub.add_mutually_exclusive_group()
    model.add_argument(
        "--model", metavar="MODEL", help="model file; default: the one that was captured"
    )
    model.add_argument(
        "--no-model", action="store_true", help="measure operators only, no buckets and steps"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: that of the graph")
    sub.add_argument("--threads", type=int, metavar="N", help="of a CPU; default: torch's")
    sub.add_argument("--precisions", metavar="A,B,...", help="default: all that the device has")
    sub.add_argument("--optimizer", default="adamw", help="adamw (default), adam or sgd")
    sub.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="time all-reduces between N processes on this machine; under torchrun its group is"
        " used instead",
    )


def _build_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("graph", metavar="GRAPH", help="graph file")
    sub.add_argument(
        "--kind",
        action="append",
        required=True,
        metavar="NAME=COSTS[,workers=N][,share=X][,memory_gb=X]",
        help="a device kind and its costs file; repeat for every kind",
    )
    sub.add_argument("--perturbation", metavar="TABLE", required=True, help="file of `perturb`")
    sub.add_argument(
        "--all-reduce", metavar="COSTS", help="costs file whose all-reduce times hold for the job"
    )
    sub.add_argument("--output", "-o", metavar="PROBLEM", required=True, help="file to write")
    _pace_options(sub)


def _train_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="Python file with build()")
    for name, text in (
        ("plan", "plan file; without one the model is trained as it is"),
        ("problem", "problem file of the plan, for its batch shares"),
        ("graph", "graph file that the plan was made for"),
    ):
        sub.add_argument(f"--{name}", metavar=name.upper(), help=text)
    ranks = sub.add_mutually_exclusive_group()
    ranks.add_argument("--kind", metavar="NAME", help="device kind of this rank")
    ranks.add_argument(
        "--ranks",
        metavar="KIND:COUNT[:threads=N][:mps=PERCENT],...",
        help="start all ranks on this machine",
    )
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an argument of build()"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    sub.add_argument("--steps", type=int, required=True, metavar="N", help="steps in all")
    sub.add_argument(
        "--batch-size", type=int, metavar="N", help="of all ranks; default: build()'s times ranks"
    )
    for name, default, text in (
        ("accumulation", 1, "micro-batches of a step"),
        ("seed", 0, "seed of the random numbers"),
        ("checkpoint-interval", 100, "steps between checkpoints; 0: at the end only"),
        ("keep", 3, "newest checkpoints that are kept"),
    ):
        sub.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    sub.add_argument("--optimizer", default="adamw", help="adamw (default), adam or sgd")
    sub.add_argument(
        "--learning-rate", type=_number, default=1e-3, metavar="X", help="default: %(default)s"
    )
    sub.add_argument(
        "--shares", metavar="KIND=X,...", help="of the batch, for one worker of each kind"
    )
    sub.add_argument(
        "--rounding", choices=("nearest", "stochastic"), default="nearest", help="default: nearest"
    )
    rivals = sub.add_mutually_exclusive_group()
    rivals.add_argument("--uniform", metavar="PRECISION", help="one precision instead of the plan")
    rivals.add_argument("--autocast", metavar="bf16|fp16", help="torch.autocast, no plan")
    sub.add_argument(
        "--emulate", action="store_true", help="run precisions that the device lacks all the same"
    )
    sub.add_argument(
        "--timeout",
        type=_number,
        default=600.0,
        metavar="S",
        help="how long a rank may keep the others waiting; default: %(default)s",
    )
    sub.add_argument(
        "--output",
        "-o",
        metavar="FOLDER",
        default="train-output",
        help="checkpoints and metrics; what is there is gone on from; default: %(default)s",
    )
    sub.add_argument(
        "--no-resume", action="store_true", help="refuse a folder that holds checkpoints"
    )


def _pace_options(sub: argparse.ArgumentParser) -> None:
    pace = sub.add_mutually_exclusive_group()
    pace.add_argument("--deadline", type=_number, metavar="S", help="iteration time to keep (s)")
    pace.add_argument(
        "--slack", type=_number, metavar="X", help="keep (1 + X) times the fastest feasible plan's"
    )


def _methods_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--methods",
        type=_methods,
        default=("uniform", "greedy", "exact"),
        metavar="A,B,...",
        help="default: uniform,greedy,exact",
    )


def _slacks_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--slacks",
        type=_numbers,
        default=_numbers(_DEFAULT_SLACKS),
        metavar="X,Y,...",
        help=f"default: {_DEFAULT_SLACKS}",
    )


def _solver_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--solver", choices=SOLVERS, default="highs", help="default: %(default)s")
    sub.add_argument(
        "--time-limit",
        type=_limit,
        default=60.0,
        metavar="S",
        help="seconds for each solve, or none; default: 60",
    )
    sub.add_argument(
        "--gap", type=_number, default=1e-4, metavar="X", help="relative gap; default: %(default)s"
    )
    sub.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    sub.add_argument(
        "--plain", action="store_true", help="give the whole program to the solver as it is"
    )


if __name__ == "__main__":
    sys.exit(main())
