"""What the modules of a converted model become.

A module is converted by giving it another class, derived from its own: the object stays, and
with it parameters (tied ones, and those an optimizer holds), buffers, hooks, the training
flag, requires_grad, the keys of the state dict, and whoever holds a reference to it.
`isinstance` keeps its answers. Reverting gives the object its first class back. The derived
classes are made as they are needed and know how to be copied and pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.precision import Precision
from qsync_opt.runtime import operators
from qsync_opt.runtime.casts import cast_floats
from qsync_opt.runtime.session import OperatorSettings, Session, aside

#: The attribute of a converted module that holds what it was told.
STATE = "_qsync_state"


class Patched:
    """Mixed in before the class of a module, to take over its `forward`."""

    #: What the name of the class gets in front: what `repr` shows.
    prefix: ClassVar[str] = ""

    #: The class that the module had, and the class that was mixed in.
    original: ClassVar[type[nn.Module]]
    mixin: ClassVar[type[Patched]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Derived classes cannot be imported by name, so copies and pickles make them again.
        return _empty, (self.mixin, self.original), self.__dict__


@cache
def _derived(mixin: Any, original: Any) -> Any:
    body = {"original": original, "mixin": mixin, "__module__": mixin.__module__}
    return type(f"{mixin.prefix}{original.__name__}", (mixin, original), body)


def derived_class(mixin: type[Patched], original: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of class `original` under a mixin; the same one every time."""
    make: Any = _derived  # mypy holds that the type of a class cannot be hashed
    derived: type[nn.Module] = make(mixin, original)
    return derived


def _empty(mixin: type[Patched], original: type[nn.Module]) -> nn.Module:
    derived = derived_class(mixin, original)
    return derived.__new__(derived)


class Layer(Patched):
    """A module that is one operator and runs it at the precision of a plan."""

    prefix = "Precision"

    #: Kind of the operator, as in the captured graph.
    kind: ClassVar[str]

    #: The class of torch that is taken over.
    base: ClassVar[type[nn.Module]]

    _qsync_state: OperatorSettings

    def forward(self, input: Tensor) -> Tensor:
        """As the class that it takes over, at the precision of the plan."""
        settings = self._qsync_state
        session = settings.session
        if not session.tells_calls_apart:  # and the compiler need not look at the scope
            return session.run(self._run, input, settings)
        out: Tensor = aside(session.scope, session.run, self._run, input, settings)
        return out

    def extra_repr(self) -> str:
        """What the layer says of itself, and the formats of its three products."""
        own = super().extra_repr()  # type: ignore[misc]
        precision = self._qsync_state.precision
        return f"{own}, precision={precision}, {self._formats(precision)}"

    def _run(self, x: Tensor, settings: OperatorSettings) -> Tensor:
        raise NotImplementedError

    def _formats(self, precision: Precision) -> str:
        half = str(precision.output)
        output, grad_input, grad_weight = {
            Precision.INT8: ("int8 x int8", half, half),
            Precision.FP8: ("e4m3 x e4m3", "e5m2 x e4m3", "e5m2 x e4m3"),
        }.get(precision, (str(precision),) * 3)
        return f"output={output}, grad_input={grad_input}, grad_weight={grad_weight}"


class LinearLayer(Layer):
    """Takes over `nn.Linear`."""

    kind = "linear"
    base = nn.Linear

    def _run(self: Any, x: Tensor, settings: OperatorSettings) -> Tensor:
        return operators.linear(x, self.weight, self.bias, settings)


class Conv2dLayer(Layer):
    """Takes over `nn.Conv2d`, with every padding, dilation and group."""

    kind = "conv2d"
    base = nn.Conv2d

    def _run(self: Any, x: Tensor, settings: OperatorSettings) -> Tensor:
        if x.dim() not in (3, 4):
            rule = "must have the shape [N, C, H, W] or [C, H, W]"
            raise ParameterError(f"input of {settings.name}", rule, tuple(x.shape))
        images = x.unsqueeze(0) if x.dim() == 3 else x
        if self.padding_mode == "zeros":
            images, zeros = operators.pad_for(images, self.padding, self.kernel_size, self.dilation)
        else:
            sides = self._reversed_padding_repeated_twice
            images, zeros = functional.pad(images, sides, mode=self.padding_mode), (0, 0)
        window = (self.stride, zeros, self.dilation, self.groups)
        out = operators.conv2d(images, self.weight, self.bias, window, settings)
        return out.squeeze(0) if x.dim() == 3 else out


class EmbeddingLayer(Layer):
    """Takes over `nn.Embedding`: a look-up multiplies nothing, only what it hands on changes.

    Rows are looked up in fp32 and handed on in the dtype of the precision; gradients of a row
    are summed in fp32.
    """

    kind = "embedding"
    base = nn.Embedding

    def _run(self: Any, x: Tensor, settings: OperatorSettings) -> Tensor:
        rows = functional.embedding(
            x,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        return operators.handed_on(rows, settings)

    def _formats(self, precision: Precision) -> str:
        return f"output={precision.output}, grad_weight=fp32"


LAYERS: tuple[type[Layer], ...] = (LinearLayer, Conv2dLayer, EmbeddingLayer)


class Fixed(Patched):
    """Takes over a module that always runs in fp32: 16-bit inputs are cast up to it."""

    _qsync_state: Session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class that it takes over."""
        wide, named = cast_floats((args, kwargs), torch.float32)
        run = super().forward  # type: ignore[misc]
        return aside(self._qsync_state.scope, run, *wide, **named)


class Bystander(Patched):
    """Takes over a module inside one whose calls are told apart: its calls are its own."""

    _qsync_state: Session

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class that it takes over."""
        run = super().forward  # type: ignore[misc]
        return aside(self._qsync_state.scope, run, *args, **kwargs)


class FollowingPReLU(Patched):
    """Takes over `nn.PReLU`: torch's own does not multiply a 16-bit input by an fp32 slope."""

    _qsync_state: Session

    def forward(self: Any, input: Tensor) -> Tensor:
        """As the class that it takes over, in the dtype of the input, as under autocast."""
        slope = self.weight.to(input.dtype)
        out: Tensor = aside(self._qsync_state.scope, functional.prelu, input, slope)
        return out


class Unfused(Bystander):
    """Takes over a module of torch that, when it is not trained, would skip the layers inside.

    Torch then calls one function for a whole block, with the fp32 weights of its layers.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class that it takes over."""
        with without_fast_path():
            return super().forward(*args, **kwargs)


#: Those modules; `nn.MultiheadAttention` does the same with its own weights.
UNFUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Torch's fused attention is off inside, for the whole process: elsewhere it costs time."""
    setting: Any = torch.backends.mha
    before = setting.get_fastpath_enabled()
    if not before or torch.compiler.is_compiling():
        yield
        return
    setting.set_fastpath_enabled(False)
    try:
        yield
    finally:
        setting.set_fastpath_enabled(before)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has, or had before it was converted."""
    return module.original if isinstance(module, Patched) else type(module)


def layer_of(module: nn.Module) -> type[Layer] | None:
    """The layer that can take a module over, None where there is none.

    A subclass with a `forward` of its own has none: what it computes is its own affair.
    """
    cls = original_class(module)
    for layer in LAYERS:
        if issubclass(cls, layer.base) and cls.forward is layer.base.forward:
            return layer
    return None
