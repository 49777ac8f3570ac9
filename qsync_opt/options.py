"""Options that several commands of `qsync-opt` share, and how their values are read.

Every command's own options stand beside the command. Nothing heavy is imported here, so that
`--help` and usage errors are instant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

#: `command(name, run, text)` makes a command of the command line and gives its parser.
AddCommand = Callable[
    [str, Callable[[argparse.Namespace], int], str],
    argparse.ArgumentParser,
]

#: The same lists as in `optimize.result`, which takes a while to import; a test compares them.
METHODS = ("auto", "exact", "greedy", "uniform", "fastest", "random", "brute_force")
SOLVERS = ("highs", "scip", "cp_sat", "cbc")

_DEFAULT_SLACKS = "0,0.02,0.05,0.1,0.2,0.5"

#: What the library calls a parameter -> what the user typed.
OPTION_OF = {
    "time_limit_s": "--time-limit",
    "relative_gap": "--gap",
    "deadline_s": "--deadline",
    "all_reduce": "--all-reduce",
    "base_plan": "--base-plan",
    "batch_size": "--batch-size",
    "batch_sizing": "--batch-sizing",
    "learning_rate": "--learning-rate",
    "checkpoint_interval": "--checkpoint-interval",
    "folder": "--output",
    "timeout_s": "--timeout",
    "hosts": "--kind",
    "measured_s": "--measured",
    "refine_interval": "--refine-interval",
    "refine_samples": "--refine-samples",
    "trace_steps": "--trace-steps",
    **{
        name: f"--{name}"
        for name in (
            "accumulation",
            "autocast",
            "batches",
            "bits",
            "buckets",
            "codes",
            "communication",
            "costs",
            "device",
            "devices",
            "draws",
            "graph",
            "keep",
            "kind",
            "method",
            "methods",
            "metrics",
            "open",
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
            "trace",
            "uniform",
        )
    },
}


def limit(text: str) -> float | None:
    """Seconds, or `none`."""
    return None if text == "none" else number(text)


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def numbers(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    return tuple(number(part) for part in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        rule = f"must be whole numbers, separated by commas, got {text!r}"
        raise argparse.ArgumentTypeError(rule) from None


def words(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(part.strip() for part in text.split(","))


def methods(text: str) -> tuple[str, ...]:
    """Names of methods between commas."""
    words = tuple(part.strip() for part in text.split(","))
    unknown = [word for word in words if word not in METHODS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"must be of {', '.join(METHODS)}, separated by commas, got {unknown[0]!r}"
        )
    return words


def pace_options(sub: argparse.ArgumentParser) -> None:
    """The pace to keep, as a deadline or relative to the fastest."""
    pace = sub.add_mutually_exclusive_group()
    pace.add_argument("--deadline", type=number, metavar="S", help="iteration time to keep (s)")
    pace.add_argument(
        "--slack", type=number, metavar="X", help="keep (1 + X) times the fastest feasible plan's"
    )


def methods_option(sub: argparse.ArgumentParser) -> None:
    """Which methods to run."""
    sub.add_argument(
        "--methods",
        type=methods,
        default=("uniform", "greedy", "exact"),
        metavar="A,B,...",
        help="default: uniform,greedy,exact",
    )


def slacks_option(sub: argparse.ArgumentParser) -> None:
    """The slacks of a Pareto curve."""
    sub.add_argument(
        "--slacks",
        type=numbers,
        default=numbers(_DEFAULT_SLACKS),
        metavar="X,Y,...",
        help=f"default: {_DEFAULT_SLACKS}",
    )


def solver_options(sub: argparse.ArgumentParser) -> None:
    """How, and how long, to solve."""
    sub.add_argument("--solver", choices=SOLVERS, default="highs", help="default: %(default)s")
    sub.add_argument(
        "--time-limit",
        type=limit,
        default=60.0,
        metavar="S",
        help="seconds for each solve, or none; default: 60",
    )
    sub.add_argument(
        "--gap", type=number, default=1e-4, metavar="X", help="relative gap; default: %(default)s"
    )
    sub.add_argument("--threads", type=int, default=2, metavar="N", help="default: %(default)s")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    sub.add_argument(
        "--plain", action="store_true", help="give the whole program to the solver as it is"
    )
