"""From the names of a plan to the modules and calls of a model, and what each becomes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from torch import nn

from qsync_opt.errors import PlanError
from qsync_opt.graph import GraphOperator, OperatorGraph, Origin, Role
from qsync_opt.precision import Precision
from qsync_opt.runtime.calls import PRODUCTS, functions_of
from qsync_opt.runtime.layers import layer_of

#: The first part of the names of calls in the loss, which is no part of the model.
LOSS = "loss"

#: Kinds that torch.autocast runs in fp32 on CUDA devices (the "float32" list of its
#: documentation), of those that models call: for plans that come without a graph.
FIXED_KINDS = frozenset(
    {
        *("softmax", "log_softmax", "softmin", "softplus", "layer_norm", "group_norm"),
        *("rms_norm", "local_response_norm", "instance_norm", "normalize", "norm", "renorm"),
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("kl_div", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss"),
        *("margin_ranking_loss", "hinge_embedding_loss", "triplet_margin_loss"),
        *("cosine_similarity", "pdist", "cdist", "dist", "cumsum", "cumprod", "prod", "sum"),
        *("exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt"),
    }
)

#: Kinds that compute in the widest dtype of their operands without being told.
_PROMOTING = frozenset({"add", "sub", "mul", "div", "truediv", "radd", "rmul", "cat", "where"})

#: Kinds that are casts themselves.
_CASTING = frozenset({"to", "float", "type"})

#: Modules of torch whose calls are on that list.
_FIXED_MODULES = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.Softplus),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.CrossEntropyLoss, nn.NLLLoss),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.KLDivLoss, nn.BCEWithLogitsLoss),
)

#: Modules of torch that multiply by fp32 weights and are no layers here, nor hold any.
_WEIGHTED_MODULES = (
    *(nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Conv1d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

#: Modules of torch that multiply and are no layers here; every other one multiplies nothing.
_PRODUCT_MODULES = (
    *_WEIGHTED_MODULES,
    *(nn.Linear, nn.Conv2d, nn.Embedding, nn.EmbeddingBag, nn.Transformer),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)

_CALL = re.compile(r"(?P<kind>[A-Za-z_]\w*)(?:\.(?P<number>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What an operator's name stands for.

    Attributes:
        path: fully qualified name of a module.
        kind: of the call that the operator is, None where it is the module itself.
        number: how many calls of this kind the module makes before it.
        role: how its precision comes about.
        function: kind of the one call that the module makes, where a graph tells it.
    """

    path: str
    kind: str | None
    number: int
    role: Role
    function: str | None = None


class Names:
    """The names of operators of one model.

    Args:
        model: the model, converted or not.
        graph: captured from it; None to go by the names and the modules alone.
    """

    def __init__(self, model: nn.Module, graph: OperatorGraph | None) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.graph = graph

    def target(self, name: str, precision: Precision) -> Target | None:
        """What a name stands for; None for a call in the loss.

        Raises:
            PlanError: the model or the graph has nothing of that name.
        """
        if self.graph is not None:
            index = self.graph.operator_index.get(name)
            if index is None:
                rule = "must be an operator of the graph"
                raise PlanError(name, rule, name, self._nearest(name))
            return self._of_graph(self.graph.operators[index])
        if name in self.modules and (name or layer_of(self.modules[name]) is not None):
            role = self._role_of_module(self.modules[name], precision)
            return Target(path=name, kind=None, number=0, role=role)
        parts = name.split(".")
        for cut in range(len(parts) - 1, -1, -1):
            path, rest = ".".join(parts[:cut]), ".".join(parts[cut:])
            if path not in self.modules:
                continue
            if rest.isdigit() and path:  # a later call of a module that is shared
                role = self._role_of_module(self.modules[path], precision)
                return Target(path=path, kind=None, number=0, role=role)
            found = self._call(path, rest)
            if found is not None:
                return found
        if parts[0] == LOSS:
            return None
        rule = "must be a module of the model, or a call that one of its modules makes"
        raise PlanError(name, rule, name, self._nearest(name))

    def _of_graph(self, operator: GraphOperator) -> Target | None:
        path = operator.module
        if path not in self.modules:
            if path.split(".")[0] == LOSS:
                return None
            rule = "must be a module of the model"
            remedy = "The graph was captured from another model, or from a wrapped one."
            raise PlanError(operator.name, rule, path, remedy)
        rest = operator.name.removeprefix(path).removeprefix(".") if path else operator.name
        call = _CALL.fullmatch(rest)
        if self._is_root_layer(path, operator.kind):
            return Target(path=path, kind=None, number=0, role=operator.role)
        if not rest or rest.isdigit() or call is None:
            return Target(
                path=path, kind=None, number=0, role=operator.role, function=operator.kind
            )
        number = int(call["number"] or 0)
        return Target(path=path, kind=operator.kind, number=number, role=operator.role)

    def _call(self, path: str, rest: str) -> Target | None:
        call = _CALL.fullmatch(rest)
        if call is None or not functions_of({call["kind"]}):
            return None
        kind, number = call["kind"], int(call["number"] or 0)
        if self._is_root_layer(path, kind):
            return Target(path=path, kind=None, number=0, role=Role.ADJUSTABLE)
        role = Role.FIXED if kind in FIXED_KINDS else Role.FOLLOWER
        role = Role.ADJUSTABLE if kind in PRODUCTS else role
        return Target(path=path, kind=kind, number=number, role=role)

    def _is_root_layer(self, path: str, kind: str) -> bool:
        """Whether a call is all that the model is: graphs name it by the call."""
        layer = None if path else layer_of(self.modules[path])
        return layer is not None and layer.kind == kind

    def _role_of_module(self, module: nn.Module, precision: Precision) -> Role:
        """Of a module without a graph: torch's own are known, others may be anything."""
        if layer_of(module) is not None:
            return Role.ADJUSTABLE
        if isinstance(module, _FIXED_MODULES):
            return Role.FIXED
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        holds_layers = any(layer_of(inner) is not None for inner in module.modules())
        multiplies = isinstance(module, _PRODUCT_MODULES) or holds_layers
        return Role.FOLLOWER if of_torch and not multiplies else Role.ADJUSTABLE

    def _nearest(self, name: str) -> str:
        known: Collection[str] = (
            self.modules if self.graph is None else self.graph.operator_index.keys()
        )
        close = get_close_matches(name, [str(item) for item in known if item], n=1)
        wrapped = all(path in ("", "module") or path.startswith("module.") for path in self.modules)
        if wrapped and not name.startswith("module."):
            return "Convert the model before it is wrapped, or convert `model.module`."
        return f"Did you mean {close[0]}?" if close else "Capture the graph of this model."


def fixed_by_default(module: nn.Module) -> bool:
    """Whether a module that no plan names runs in fp32 all the same."""
    return isinstance(module, (*_FIXED_MODULES, *_WEIGHTED_MODULES))


class Flow:
    """What operators hand to one another under a plan, read from a graph.

    Args:
        graph: of the model.
        plan: precision of every adjustable operator; of others where it is listed.
    """

    def __init__(self, graph: OperatorGraph, plan: Mapping[str, Precision]) -> None:
        self._graph = graph
        self._plan = plan

    @cached_property
    def _handed(self) -> list[Precision]:
        """The dtype that each operator hands on."""
        handed: list[Precision] = []
        for operator in self._graph.operators:
            planned = self._plan.get(operator.name)
            if operator.role is Role.ADJUSTABLE:
                handed.append((planned or Precision.FP32).output)
            elif operator.role is Role.FIXED:
                handed.append(Precision.FP32)
            else:
                follows = {handed[index] for index in operator.follows}
                handed.append(follows.pop() if len(follows) == 1 else Precision.FP32)
        return handed

    def source(self, name: str) -> str:
        """A name for what an operator reads, the same for all operators that read it."""
        operator = self._graph.operators[self._graph.operator_index[name]]
        if not operator.inputs:
            return name
        index = operator.inputs[0]
        producer = self._graph.tensors[index].producer
        if producer is None:
            return f"{self._graph.tensors[index].origin} {index}"
        made = self._graph.operators[producer]
        return f"{made.name} output {made.outputs.index(index)}"

    def is_last_reader(self, name: str) -> bool:
        """Whether no adjustable operator after this one reads what it reads."""
        number = self._graph.operator_index[name]
        inputs = self._graph.operators[number].inputs
        readers = self._graph.tensors[inputs[0]].consumers if inputs else ()
        adjustable = (i for i in readers if self._graph.operators[i].role is Role.ADJUSTABLE)
        return max(adjustable, default=number) <= number

    def arrives_as(self, name: str, dtype: Precision) -> bool:
        """Whether every float that an operator reads has this dtype without any help."""
        return all(arriving is dtype for arriving in self._arriving(name))

    def becomes_fp32(self, name: str) -> bool:
        """Whether torch itself promotes what an operator reads to fp32."""
        operator = self._graph.operators[self._graph.operator_index[name]]
        if operator.kind in _CASTING:
            return True
        promotes = operator.kind in _PROMOTING and Precision.FP32 in self._arriving(name)
        return promotes or self.arrives_as(name, Precision.FP32)

    def _arriving(self, name: str) -> list[Precision]:
        """The dtypes of the floats that an operator reads."""
        operator = self._graph.operators[self._graph.operator_index[name]]
        operands = self._graph.signatures[operator.signature].operands
        arriving = []
        for operand, index in zip(operands, operator.inputs, strict=True):
            if operand.dtype.startswith(("float", "bfloat")) and operand.shape:
                producer = self._graph.tensors[index].producer
                made = operand.origin is Origin.OPERATOR and producer is not None
                arriving.append(self._handed[producer] if made else Precision.FP32)  # type: ignore[index]
        return arriving
