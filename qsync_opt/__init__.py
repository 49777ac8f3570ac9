"""Optimal mixed-precision allocation for training on unequal devices.

The public names are loaded when they are first used, so importing the package imports
neither numpy nor a solver nor torch. `import qsync_opt as qo` is the usual form.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qsync_opt.build import build_problem as build_problem
    from qsync_opt.costs import Cluster as Cluster
    from qsync_opt.costs import ClusterKind as ClusterKind
    from qsync_opt.costs import DeviceCosts as DeviceCosts
    from qsync_opt.errors import CaptureError as CaptureError
    from qsync_opt.errors import CostsError as CostsError
    from qsync_opt.errors import FormatError as FormatError
    from qsync_opt.errors import GraphError as GraphError
    from qsync_opt.errors import InfeasibleError as InfeasibleError
    from qsync_opt.errors import ParameterError as ParameterError
    from qsync_opt.errors import PlanError as PlanError
    from qsync_opt.errors import ProblemError as ProblemError
    from qsync_opt.errors import QsyncError as QsyncError
    from qsync_opt.errors import SolverUnavailableError as SolverUnavailableError
    from qsync_opt.files import load_costs as load_costs
    from qsync_opt.files import load_graph as load_graph
    from qsync_opt.files import load_perturbations as load_perturbations
    from qsync_opt.files import load_plan as load_plan
    from qsync_opt.files import load_problem as load_problem
    from qsync_opt.files import save_costs as save_costs
    from qsync_opt.files import save_graph as save_graph
    from qsync_opt.files import save_perturbations as save_perturbations
    from qsync_opt.files import save_plan as save_plan
    from qsync_opt.files import save_problem as save_problem
    from qsync_opt.graph import OperatorGraph as OperatorGraph
    from qsync_opt.hosts import calibrate as calibrate
    from qsync_opt.hosts import host_costs as host_costs
    from qsync_opt.measure.capture import capture as capture
    from qsync_opt.measure.measuring import measure as measure
    from qsync_opt.measure.sensitivity import perturbations as perturbations
    from qsync_opt.optimize.buckets import Bucket as Bucket
    from qsync_opt.optimize.buckets import BucketCode as BucketCode
    from qsync_opt.optimize.compare import compare as compare
    from qsync_opt.optimize.compare import pareto as pareto
    from qsync_opt.optimize.evaluate import Evaluation as Evaluation
    from qsync_opt.optimize.evaluate import evaluate as evaluate
    from qsync_opt.optimize.explain import explain as explain
    from qsync_opt.optimize.export import read_mps_solution as read_mps_solution
    from qsync_opt.optimize.export import write_mps as write_mps
    from qsync_opt.optimize.generate import generate_problem as generate_problem
    from qsync_opt.optimize.problem import AllocationProblem as AllocationProblem
    from qsync_opt.optimize.problem import DeviceKind as DeviceKind
    from qsync_opt.optimize.problem import Operator as Operator
    from qsync_opt.optimize.result import SolveParameters as SolveParameters
    from qsync_opt.optimize.result import SolveResult as SolveResult
    from qsync_opt.optimize.result import SolveStatus as SolveStatus
    from qsync_opt.optimize.solve import solve as solve
    from qsync_opt.optimize.tensors import CastTensors as CastTensors
    from qsync_opt.optimize.tensors import SavedTensors as SavedTensors
    from qsync_opt.perturbation import PerturbationTable as PerturbationTable
    from qsync_opt.plan import PrecisionPlan as PrecisionPlan
    from qsync_opt.precision import Precision as Precision
    from qsync_opt.replayed import solve_replayed as solve_replayed
    from qsync_opt.runtime.availability import available_precisions as available_precisions
    from qsync_opt.runtime.communication import Communication as Communication
    from qsync_opt.runtime.communication import parse_communication as parse_communication
    from qsync_opt.runtime.convert import convert as convert
    from qsync_opt.runtime.convert import revert as revert
    from qsync_opt.runtime.convert import set_step as set_step
    from qsync_opt.runtime.parameters import TrainParameters as TrainParameters
    from qsync_opt.runtime.quantized_comm import compress_gradients as compress_gradients
    from qsync_opt.runtime.quantized_sharding import quantize_sharding as quantize_sharding
    from qsync_opt.runtime.trainer import train as train
    from qsync_opt.simulate.replay import Replay as Replay
    from qsync_opt.simulate.replay import replay as replay
    from qsync_opt.simulate.tasks import HostCosts as HostCosts

__version__ = "0.1.0"

#: The modules and what each of them makes public.
_PUBLIC = {
    "qsync_opt.build": ("build_problem",),
    "qsync_opt.costs": ("Cluster", "ClusterKind", "DeviceCosts"),
    "qsync_opt.errors": (
        "CaptureError",
        "CostsError",
        "FormatError",
        "GraphError",
        "InfeasibleError",
        "ParameterError",
        "PlanError",
        "ProblemError",
        "QsyncError",
        "SolverUnavailableError",
    ),
    "qsync_opt.files": (
        "load_costs",
        "load_graph",
        "load_perturbations",
        "load_plan",
        "load_problem",
        "save_costs",
        "save_graph",
        "save_perturbations",
        "save_plan",
        "save_problem",
    ),
    "qsync_opt.graph": ("OperatorGraph",),
    "qsync_opt.hosts": ("calibrate", "host_costs"),
    "qsync_opt.measure.capture": ("capture",),
    "qsync_opt.measure.measuring": ("measure",),
    "qsync_opt.measure.sensitivity": ("perturbations",),
    "qsync_opt.optimize.buckets": ("Bucket", "BucketCode"),
    "qsync_opt.optimize.compare": ("compare", "pareto"),
    "qsync_opt.optimize.evaluate": ("Evaluation", "evaluate"),
    "qsync_opt.optimize.explain": ("explain",),
    "qsync_opt.optimize.export": ("read_mps_solution", "write_mps"),
    "qsync_opt.optimize.generate": ("generate_problem",),
    "qsync_opt.optimize.problem": (
        "AllocationProblem",
        "DeviceKind",
        "Operator",
    ),
    "qsync_opt.optimize.result": ("SolveParameters", "SolveResult", "SolveStatus"),
    "qsync_opt.optimize.solve": ("solve",),
    "qsync_opt.optimize.tensors": ("CastTensors", "SavedTensors"),
    "qsync_opt.perturbation": ("PerturbationTable",),
    "qsync_opt.plan": ("PrecisionPlan",),
    "qsync_opt.precision": ("Precision",),
    "qsync_opt.replayed": ("solve_replayed",),
    "qsync_opt.runtime.availability": ("available_precisions",),
    "qsync_opt.runtime.communication": ("Communication", "parse_communication"),
    "qsync_opt.runtime.convert": ("convert", "revert", "set_step"),
    "qsync_opt.runtime.parameters": ("TrainParameters",),
    "qsync_opt.runtime.quantized_comm": ("compress_gradients",),
    "qsync_opt.runtime.quantized_sharding": ("quantize_sharding",),
    "qsync_opt.runtime.trainer": ("train",),
    "qsync_opt.simulate.replay": ("Replay", "replay"),
    "qsync_opt.simulate.tasks": ("HostCosts",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
