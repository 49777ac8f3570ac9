"""Patching a model by a plan, and taking the patch off again.

`convert` finds each operator by its name, in both directions: a name without an operator and
an operator without a name are errors. Nothing is changed before everything is checked. How
modules are taken over, and why that way, stands in `layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.kernels.host_library import compiled_layers
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.assignment import Assignment, listed
from qsync_opt.runtime.calls import PRODUCTS
from qsync_opt.runtime.layers import STATE, Patched, original_class
from qsync_opt.runtime.session import Session
from qsync_opt.runtime.targets import Flow, Names

#: Precisions whose layers run compiled.
_HALF = frozenset({Precision.BF16, Precision.FP16})


def convert(
    model: nn.Module,
    plan: Mapping[str, Precision],
    *,
    graph: OperatorGraph | None = None,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    rank: int | None = None,
    emulate: bool = False,
    ignore: Collection[str] = (),
) -> nn.Module:
    """Let every operator of a model run at the precision of a plan.

    Convert before the model is wrapped (DistributedDataParallel, fully_shard, torch.compile).
    Parameters stay fp32, and so do gradients.

    Args:
        model: changed in place.
        plan: operator -> precision, as `PrecisionPlan.for_device` gives it. Followers and
            fixed operators may be left out.
        graph: the captured graph that the plan was made for. With it, calls need no help
            where operands arrive in the right dtype anyway, and roles are known; without it,
            they are told from the names and from torch's own modules.
        rounding: of everything that is quantised. Stochastic rounding needs `set_step`.
        seed: of the random bits, equal on every rank.
        rank: folded into the seed; None for the rank of the default process group.
        emulate: run precisions that the device lacks with what it has.
        ignore: names of layers that stay as they are although no plan names them.

    Returns:
        The same model.

    Raises:
        PlanError: a name that is no operator of the model, an adjustable operator that the
            plan lacks, or a precision that the operator or the device does not have.
        ParameterError: a model that is converted already, or parameters that are not fp32.
    """
    _check_options(model, rounding, seed, ignore)
    precisions = _checked(plan)
    names = Names(model, graph)
    _require_plain(names)
    session = Session(rounding, seed, _rank() if rank is None else rank)
    work = Assignment(
        names=names,
        session=session,
        flow=None if graph is None else Flow(graph, precisions),
        lowers=any(precision.output is not Precision.FP32 for precision in precisions.values()),
        emulate=emulate,
        device=next((p.device for p in model.parameters()), torch.device("cpu")),
    )
    for name, precision in {**_fixed_in(graph), **precisions}.items():
        target = names.target(name, precision)
        if target is not None:
            work.add(name, precision, target)
        elif precision.output is not Precision.FP32 and _multiplies(names, name):
            remedy = "Pin it to fp32, or move it into the model."
            raise PlanError(
                name, "must be fp32, because the loss is not patched", precision, remedy
            )
    work.require_all(set(ignore))
    work.apply()
    if not _HALF.isdisjoint(precisions.values()):
        compiled_layers()  # built now, where it has to be, and not in the first step
    return model


def revert(model: nn.Module) -> nn.Module:
    """Give every module of a converted model the class it had; others stay as they are.

    Returns:
        The same model.

    Raises:
        ParameterError: a module's class was changed again after `convert`.
    """
    patched = {name: m for name, m in model.named_modules() if original_class(m) is not type(m)}
    for name, module in patched.items():
        if "original" not in vars(type(module)):
            rule = "must have the class that convert gave it"
            remedy = "Undo what was done after convert first: fully_shard, parametrizations."
            raise ParameterError(name or "model", rule, type(module).__name__, remedy)
    for module in patched.values():
        module.__class__ = original_class(module)
        del vars(module)[STATE]
    return model


def set_step(model: nn.Module, step: int) -> None:
    """Say which step it is: the random bits of stochastic rounding depend on it.

    Call it before the forward of every step. With gradient accumulation count micro-batches,
    or they all round alike.

    Args:
        model: converted.
        step: any integer that no other step has.
    """
    for session in sessions_of(model):
        session.step = step


def sessions_of(model: nn.Module) -> tuple[Session, ...]:
    """What the operators of a model share: one for every call of `convert`, or of copying.

    Args:
        model: converted or not.
    """
    found: dict[int, Session] = {}
    for module in model.modules():
        if isinstance(module, Patched):
            state = vars(module)[STATE]
            session = state if isinstance(state, Session) else state.session
            found[id(session)] = session
    return tuple(found.values())


def _check_options(model: object, rounding: object, seed: object, ignore: object) -> None:
    if not isinstance(model, nn.Module):
        raise ParameterError("model", "must be a module", type(model).__name__)
    if not isinstance(rounding, Rounding):
        rule = f"must be one of {', '.join(f'Rounding.{item.name}' for item in Rounding)}"
        raise ParameterError("rounding", rule, rounding)
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ParameterError("seed", "must be an integer of 64 bits", seed)
    if isinstance(ignore, str):
        raise ParameterError("ignore", "must be a collection of names", ignore)


def _checked(plan: object) -> dict[str, Precision]:
    if not isinstance(plan, Mapping) or not plan:
        rule = "must map operator names to precisions"
        raise PlanError("plan", rule, plan, "Use PrecisionPlan.for_device(kind).")
    precisions = {}
    for name, value in plan.items():
        if not isinstance(name, str):
            raise PlanError("plan", "must have names of operators as keys", name)
        try:
            precisions[name] = Precision(value)
        except ValueError:
            rule = f"must be one of {listed(Precision)}"
            raise PlanError(str(name), rule, value) from None
    return precisions


def _require_plain(names: Names) -> None:
    for path, module in names.modules.items():
        if isinstance(module, Patched):
            rule = "must not be converted already"
            raise ParameterError(path or "model", rule, type(module).__name__, "Call revert first.")
        if "forward" in vars(module):
            rule = "must use the forward of its class"
            remedy = "Something replaced `forward` on the object; convert before that."
            raise ParameterError(path or "model", rule, "a forward of its own", remedy)


def _fixed_in(graph: OperatorGraph | None) -> dict[str, Precision]:
    """What a plan may leave out and a model cannot: operators that need fp32 handed to them."""
    rows = () if graph is None else graph.operators
    return {row.name: Precision.FP32 for row in rows if row.role is Role.FIXED}


def _multiplies(names: Names, name: str) -> bool:
    if names.graph is None:
        return not PRODUCTS.isdisjoint(name.split("."))
    return names.graph.operators[names.graph.operator_index[name]].role is Role.ADJUSTABLE


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0
