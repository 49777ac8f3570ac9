"""What becomes of each module of a model under a plan: collected, checked, then done at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.graph import Role
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.calls import CallOwner, ModuleCalls
from qsync_opt.runtime.layers import (
    STATE,
    UNFUSED,
    Bystander,
    Fixed,
    FollowingPReLU,
    Patched,
    Unfused,
    derived_class,
    layer_of,
)
from qsync_opt.runtime.session import OperatorSettings, Session
from qsync_opt.runtime.targets import Flow, Names, Target, fixed_by_default

_OTHER_DEVICE = "Plan for this device, move the model to its own first, or pass emulate=True."


@dataclass(kw_only=True)
class _Calls:
    """What is known so far of the calls of one module."""

    whole: OperatorSettings | None = None
    planned: dict[str, dict[int, OperatorSettings | None]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)

    @property
    def does_something(self) -> bool:
        told = any(call is not None for calls in self.planned.values() for call in calls.values())
        return self.whole is not None or told or bool(self.fixed)


@dataclass(kw_only=True)
class Assignment:
    """Collects what becomes of each module, and does it at the end.

    A module is known by itself, because it may have several names.

    Attributes:
        names: of the model.
        session: of the conversion.
        flow: what operators hand to one another; None without a graph.
        lowers: whether any operator hands on less than fp32.
        emulate: whether precisions that the device lacks are allowed.
        device: of operators without parameters.
        layers: modules that become layers.
        calls: modules whose calls are operators.
        fixed: modules that run in fp32.
        named: modules that the plan names and that choose no precision.
    """

    names: Names
    session: Session
    flow: Flow | None
    lowers: bool
    emulate: bool
    device: torch.device
    layers: dict[nn.Module, OperatorSettings] = field(default_factory=dict)
    calls: dict[nn.Module, _Calls] = field(default_factory=dict)
    fixed: set[nn.Module] = field(default_factory=set)
    named: set[nn.Module] = field(default_factory=set)

    def add(self, name: str, precision: Precision, target: Target) -> None:
        """Take up one operator of the plan."""
        module = self.names.modules[target.path]
        if target.role is not Role.ADJUSTABLE:
            self._add_other(name, precision, target, module)
            return
        layer = layer_of(module) if target.kind is None else None
        kind = target.kind or (layer.kind if layer else target.function)
        if kind is None and isinstance(module, nn.RNNBase):
            kind = module.mode.lower()
        self._require_precision(name, precision, kind, module)
        if isinstance(module, nn.RNNBase):
            # It compares the dtypes of inputs and weights before it calls what multiplies.
            self.fixed.add(module)
            planned = self.calls.setdefault(module, _Calls()).planned
            planned.setdefault(target.kind or kind or "", {})[target.number] = None
            return
        settings = OperatorSettings(
            name=name,
            precision=precision,
            source=name if self.flow is None else self.flow.source(name),
            session=self.session,
            is_last_reader=self.flow is not None and self.flow.is_last_reader(name),
        )
        if layer is not None:
            _require_fp32(target.path, module)
            self._tell(self.layers, module, settings)
        elif target.kind is None:
            if any(layer_of(inner) is not None for inner in module.modules()):
                rule = "must be an operator, not a module that contains some"
                raise PlanError(name, rule, _class_name(module), "Plan the operators inside.")
            calls = self.calls.setdefault(module, _Calls())
            if calls.whole is not None and calls.whole.precision is not precision:
                _conflict(calls.whole, settings)
            calls.whole = settings
        else:
            planned = self.calls.setdefault(module, _Calls()).planned
            planned.setdefault(target.kind, {})[target.number] = self._if_needed(settings)

    def require_all(self, ignore: set[str]) -> None:
        """Every layer, and every call before one that is planned, must be in the plan."""
        unknown = ignore - self.names.modules.keys()
        if unknown:
            raise PlanError("ignore", "must name modules of the model", min(unknown))
        graph = self.names.graph
        inner = {
            child
            for module in self.names.modules.values()
            if isinstance(module, nn.MultiheadAttention)
            for child in module.modules()
        }
        expected = (
            {operator.module for operator in graph.operators if operator.role is Role.ADJUSTABLE}
            if graph is not None
            else self.names.modules.keys()
        )
        for path, module in self.names.modules.items():
            wanted = path in expected and path not in ignore and module not in inner
            if wanted and layer_of(module) is not None and module not in self.layers:
                _missing(path or "model")
        if graph is not None:
            for index in graph.adjustable:
                operator = graph.operators[index]
                known = operator.module in self.names.modules
                if known and not self._is_told(operator.name, operator.module, ignore):
                    _missing(operator.name)
        for module, calls in self.calls.items():
            for kind, planned in calls.planned.items():
                gap = next((n for n in range(max(planned)) if n not in planned), None)
                if gap is not None:
                    path = next(p for p, m in self.names.modules.items() if m is module)
                    _missing(".".join(filter(None, (path, kind, str(gap) if gap else ""))))

    def apply(self) -> None:
        """Change the classes of modules."""
        owners = {module: calls for module, calls in self.calls.items() if calls.does_something}
        self.session.tells_calls_apart = bool(owners)
        told = {*self.layers, *self.calls, *self.named}
        if self.lowers and self.flow is None:
            modules = self.names.modules.values()
            self.fixed |= {m for m in modules if fixed_by_default(m) and m not in told}
        paths = {module: path for path, module in reversed(self.names.modules.items())}
        inside = {inner for module in owners for inner in module.modules()}
        for path, module in self.names.modules.items():
            if paths[module] != path or isinstance(module, Patched):
                continue
            layer = layer_of(module)
            if module in self.layers and layer is not None:
                _take_over(module, layer, self.layers[module])
            elif module in owners:
                _take_over(module, CallOwner, self._module_calls(path, owners[module]))
            elif module in self.fixed:
                _take_over(module, Fixed, self.session)
            elif self.lowers and type(module).forward is nn.PReLU.forward:
                _take_over(module, FollowingPReLU, self.session)
            elif isinstance(module, UNFUSED) and not told.isdisjoint(module.modules()):
                _take_over(module, Unfused, self.session)
            elif module in inside and type(module).forward is not nn.Module.forward:
                _take_over(module, Bystander, self.session)

    def _add_other(
        self, name: str, precision: Precision, target: Target, module: nn.Module
    ) -> None:
        """A follower runs in what it gets; a fixed operator gets fp32."""
        if precision not in HANDED_ON:
            rule = f"must be one of {', '.join(HANDED_ON)}, because it multiplies nothing"
            raise PlanError(name, rule, precision)
        if target.kind is None:
            self.named.add(module)
        if precision is not Precision.FP32 and target.role is Role.FIXED and self.flow is not None:
            raise PlanError(name, "must be fp32, as torch.autocast has it", precision)
        # What is fixed on one type of device may follow on another: without a graph the plan
        # says which it is.
        if target.role is Role.FOLLOWER or precision is not Precision.FP32 or not self.lowers:
            return
        if self.flow is not None and self.flow.becomes_fp32(name):
            return
        if target.kind is None or isinstance(module, nn.RNNBase):
            self.fixed.add(module)
        else:
            self.calls.setdefault(module, _Calls()).fixed.add(target.kind)

    def _if_needed(self, settings: OperatorSettings) -> OperatorSettings | None:
        """None for a 16-bit call whose operands arrive in 16 bits anyway."""
        precision = settings.precision
        half = precision in (Precision.BF16, Precision.FP16)
        if half and self.flow is not None and self.flow.arrives_as(settings.name, precision):
            return None
        return settings

    def _module_calls(self, path: str, calls: _Calls) -> ModuleCalls:
        return ModuleCalls(
            module=path,
            whole=calls.whole,
            planned={
                kind: tuple(planned[number] for number in sorted(planned))
                for kind, planned in calls.planned.items()
            },
            fixed=frozenset(calls.fixed),
            session=self.session,
        )

    def _require_precision(
        self, name: str, precision: Precision, kind: str | None, module: nn.Module
    ) -> None:
        supported = supported_precisions(kind) if kind else frozenset(Precision)
        if precision not in supported:
            rule = f"must be one of {listed(supported)}, which is what {kind} has"
            raise PlanError(name, rule, precision)
        device = next((p.device for p in module.parameters(False)), self.device)
        if self.emulate or device.type == "meta":
            return
        available = available_precisions(device)
        if precision not in available:
            rule = f"must be one of {listed(available)}, which is what {device} has"
            raise PlanError(name, rule, precision, _OTHER_DEVICE)

    def _is_told(self, name: str, path: str, ignore: set[str]) -> bool:
        module = self.names.modules[path]
        if path in ignore or module in self.layers:
            return True
        calls = self.calls.get(module)
        target = self.names.target(name, Precision.FP32)
        if calls is None or target is None:
            return False
        if target.kind is None:
            return calls.whole is not None
        return target.number in calls.planned.get(target.kind, {})

    @staticmethod
    def _tell(
        told: dict[nn.Module, OperatorSettings], module: nn.Module, settings: OperatorSettings
    ) -> None:
        before = told.setdefault(module, settings)
        if before.precision is not settings.precision:
            _conflict(before, settings)


def _take_over(module: nn.Module, mixin: type[Patched], state: object) -> None:
    module.__dict__[STATE] = state
    module.__class__ = derived_class(mixin, type(module))


def _require_fp32(path: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(path, recurse=False):
        if isinstance(parameter, UninitializedParameter):
            rule, remedy = "must be initialised", "Run the model once before converting it."
            raise ParameterError(name, rule, "an uninitialised parameter", remedy)
        if parameter.dtype is not torch.float32:
            rule = "must have dtype float32"
            remedy = "Precision lives inside the operators: keep parameters fp32, `model.float()`."
            raise ParameterError(name, rule, parameter.dtype, remedy)


def _missing(name: str) -> None:
    rule = "must be in the plan, because its precision is chosen"
    raise PlanError(name, rule, None, "Plan it, or name its module in `ignore`.")


def _conflict(first: OperatorSettings, second: OperatorSettings) -> None:
    rule = f"must be {first.precision} as {first.name} is: one module runs both"
    raise PlanError(second.name, rule, second.precision)


def listed(precisions: Collection[Precision] | type[Precision]) -> str:
    """Precisions for a message, in the order of the enum."""
    return ", ".join(str(precision) for precision in Precision if precision in precisions)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
