"""Optimal mixed-precision allocation for training on unequal devices.

The public names are loaded when they are first used, so importing the package imports
neither numpy nor a solver. `import qsync_opt as qo` is the usual form.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qsync_opt.errors import FormatError as FormatError
    from qsync_opt.errors import InfeasibleError as InfeasibleError
    from qsync_opt.errors import ParameterError as ParameterError
    from qsync_opt.errors import PlanError as PlanError
    from qsync_opt.errors import ProblemError as ProblemError
    from qsync_opt.errors import QsyncError as QsyncError
    from qsync_opt.errors import SolverUnavailableError as SolverUnavailableError
    from qsync_opt.files import load_plan as load_plan
    from qsync_opt.files import load_problem as load_problem
    from qsync_opt.files import save_plan as save_plan
    from qsync_opt.files import save_problem as save_problem
    from qsync_opt.optimize.compare import compare as compare
    from qsync_opt.optimize.compare import pareto as pareto
    from qsync_opt.optimize.evaluate import Evaluation as Evaluation
    from qsync_opt.optimize.evaluate import evaluate as evaluate
    from qsync_opt.optimize.explain import explain as explain
    from qsync_opt.optimize.export import read_mps_solution as read_mps_solution
    from qsync_opt.optimize.export import write_mps as write_mps
    from qsync_opt.optimize.generate import generate_problem as generate_problem
    from qsync_opt.optimize.problem import AllocationProblem as AllocationProblem
    from qsync_opt.optimize.problem import Bucket as Bucket
    from qsync_opt.optimize.problem import CastTensors as CastTensors
    from qsync_opt.optimize.problem import DeviceKind as DeviceKind
    from qsync_opt.optimize.problem import Operator as Operator
    from qsync_opt.optimize.problem import SavedTensors as SavedTensors
    from qsync_opt.optimize.result import SolveParameters as SolveParameters
    from qsync_opt.optimize.result import SolveResult as SolveResult
    from qsync_opt.optimize.result import SolveStatus as SolveStatus
    from qsync_opt.optimize.solve import solve as solve
    from qsync_opt.plan import PrecisionPlan as PrecisionPlan
    from qsync_opt.precision import Precision as Precision

__version__ = "0.1.0"

#: The modules and what each of them makes public.
_PUBLIC = {
    "qsync_opt.errors": (
        "FormatError",
        "InfeasibleError",
        "ParameterError",
        "PlanError",
        "ProblemError",
        "QsyncError",
        "SolverUnavailableError",
    ),
    "qsync_opt.files": ("load_plan", "load_problem", "save_plan", "save_problem"),
    "qsync_opt.optimize.compare": ("compare", "pareto"),
    "qsync_opt.optimize.evaluate": ("Evaluation", "evaluate"),
    "qsync_opt.optimize.explain": ("explain",),
    "qsync_opt.optimize.export": ("read_mps_solution", "write_mps"),
    "qsync_opt.optimize.generate": ("generate_problem",),
    "qsync_opt.optimize.problem": (
        "AllocationProblem",
        "Bucket",
        "CastTensors",
        "DeviceKind",
        "Operator",
        "SavedTensors",
    ),
    "qsync_opt.optimize.result": ("SolveParameters", "SolveResult", "SolveStatus"),
    "qsync_opt.optimize.solve": ("solve",),
    "qsync_opt.plan": ("PrecisionPlan",),
    "qsync_opt.precision": ("Precision",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
