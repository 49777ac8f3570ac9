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
from typing import TYPE_CHECKING, NoReturn

from qsync_opt import (
    __version__,
    build_commands,
    calibrate_commands,
    commands,
    cost_commands,
    demo_commands,
    model_commands,
    problem_commands,
    replay_commands,
    report_commands,
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
from qsync_opt.options import OPTION_OF

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Where the commands are, in the order in which `--help` lists them.
_MODULES = (
    model_commands,
    cost_commands,
    build_commands,
    commands,
    problem_commands,
    replay_commands,
    train_commands,
    calibrate_commands,
    report_commands,
    demo_commands,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see the module)."""
    if sys.stdout is None:  # closed by the caller: there is nobody to write to
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        try:
            arguments = parser().parse_args(argv)
            arguments.words = sys.argv[1:] if argv is None else list(argv)
            _require_another_file(arguments)
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
        if error.field in OPTION_OF:
            text = OPTION_OF[error.field] + text.removeprefix(error.field)
        return _fail(text, EXIT_BAD_INPUT)
    except QsyncError as error:
        return _fail(str(error), EXIT_BAD_INPUT)
    except OSError as error:
        _abandon_stdout()
        where = error.filename if error.filename is not None else "standard output"
        return _fail(f"{where}: {error.strerror or error}", EXIT_BAD_INPUT)
    except MemoryError:
        return _fail("not enough memory for a problem of this size", EXIT_BAD_INPUT)


def _require_another_file(arguments: argparse.Namespace) -> None:
    """Refuse to write the result over a file that is read.

    Raises:
        ParameterError: that would happen.
    """
    options = dict(vars(arguments))
    output = options.pop("output", None)
    del options["words"]
    if output is None or not os.path.isfile(output):
        return
    for value in options.values():
        for item in value if isinstance(value, list) else [value]:
            read = str(item).rpartition("=")[2]  # some are KIND=FILE
            if os.path.isfile(read) and os.path.samefile(read, output):
                rule = "must not be a file that the command reads"
                raise ParameterError("--output", rule, output, "Name another.")


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

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="write one JSON object, nothing else")
        return sub

    for module in _MODULES:
        module.add_commands(command)
    return whole


if __name__ == "__main__":
    sys.exit(main())
