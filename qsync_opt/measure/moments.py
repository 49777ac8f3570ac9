"""One observed step: values, gradients, and how far noise in each spreads to all gradients.

How noise spreads. Write g for the gradient of the loss for all parameters, and let e be noise
that is added to a tensor inside the step: to an operand or an output on the way forward, or to
one of their gradients on the way back. To first order g moves by M e with M = dg/de, a matrix
of [all parameters, elements of the tensor]. For noise of independent elements with mean 0

    E ||M e||^2 = sum_i E e_i^2 * sum_p M_pi^2.

The column sums come for every tensor of the step at once from a few backward passes through
the gradient (double backward): for v with independent entries +-1, s = d<g, v>/de = M^T v has
E s_i^2 = sum_p M_pi^2. This is Hutchinson's estimator (Communications in Statistics 19, 1990)
for the diagonal of M^T M; `Tap.value_power` and `Tap.gradient_power` are means of s_i^2 over
the probes. It sees everything that the noise does: through later layers into the loss and
back, in the weight gradient of its own layer, and in the layers before it.

The same pass gives Hv for the Hessian H of the loss, and v_w . (Hv)_w is Hutchinson's estimate
of the trace of the block of H that belongs to a parameter w (HAWQ-V2, arXiv 1911.03852).

Kinks (`kinks`) need one more pass: how large noise in a tensor is when it reaches them. With
signs u and weights c on the inputs of all kinks k, the derivative of sum_k c_k <u_k, x_k> gives
in the same way `Tap.spread_power`, with which noise e amounts to sum_k c_k^2 E ||e_k||^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qsync_opt.errors import CaptureError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.flows import Pass, Product, Replayable, Tap
from qsync_opt.measure.kinks import Kink, find_kinks
from qsync_opt.measure.step import Loss, call_model, loss_of, split_batch
from qsync_opt.measure.taps import Taps

#: Where `torch.amp.GradScaler` starts, and the largest number that fp16 holds.
LARGEST_LOSS_SCALE = 2.0**16
_RAISES = "torch::autograd::Error"
_LARGEST_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one step showed.

    Attributes:
        loss: its value.
        products: adjustable operators by index.
        replayables: other differentiable operators by index; empty without probes.
        gradients: parameter by index in `graph.parameters` -> its gradient.
        traces: parameter by index -> estimate of the trace of its block of the Hessian.
        kinks: where gradients jump.
        loss_scale: what fp16 needs so that its gradients neither overflow nor vanish.
    """

    loss: float
    products: dict[int, Product]
    replayables: dict[int, Replayable]
    gradients: dict[int, Tensor]
    traces: dict[int, float]
    kinks: list[Kink]
    loss_scale: float


def observe(
    model: nn.Module,
    batch: Any,
    graph: OperatorGraph,
    *,
    loss: Loss | None = None,
    probes: int = 0,
    replays: bool = False,
    seed: int = 0,
) -> Observation:
    """Run one step in fp32 with taps, and probe its gradient.

    Args:
        model: that the graph was captured from.
        batch: as in `capture`.
        graph: of the model.
        loss: as in `capture`.
        probes: vectors v; each costs about three backward passes. 0 leaves the powers out.
        replays: find kinks, and keep what followers need to run again.
        seed: of the model's own random numbers (dropout) and of the probes.

    Raises:
        CaptureError: an operator did not run, the loss or a gradient is not finite, memory ran
            out, or something in the step cannot be differentiated twice.
    """
    try:
        return _observe(model, batch, graph, loss, probes, replays, seed)
    except torch.OutOfMemoryError as error:
        raise CaptureError(
            f"the step ran out of memory: {str(error).splitlines()[0]}",
            "Give a smaller batch: only the model must be the one of the graph",
        ) from error


def _observe(
    model: nn.Module,
    batch: Any,
    graph: OperatorGraph,
    loss: Loss | None,
    probes: int,
    replays: bool,
    seed: int,
) -> Observation:
    inputs, target = split_batch(batch, loss)
    every = list(model.parameters())
    trained = {i: p for i, p in enumerate(every) if p.requires_grad}
    parameters = list(trained.values())
    device = every[0].device
    taps = Taps(model, graph, replays=replays, two_weights=probes > 0)
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    # Fused attention has no second derivative.
    plain = sdpa_kernel(SDPBackend.MATH) if probes else nullcontext()
    with torch.enable_grad(), plain:
        with taps.listening():
            output = call_model(model, inputs)
            with taps.loss():
                value = loss_of(output, target, loss)
        found = torch.autograd.grad(value, parameters, create_graph=probes > 0, allow_unused=True)
        gradients = {i: g for i, g in zip(trained, found, strict=True) if g is not None}
        require_finite(value.detach(), gradients.values())
        if probes:
            _require_second_derivatives(gradients)
        traces = dict.fromkeys(trained, 0.0) if probes else {}
        wanted = [*parameters, *taps.leaves]
        taps.passes.now = Pass.PROBE
        for _ in range(probes):
            signs = {i: _signs(trained[i], generator) for i in gradients}
            seconds = _second(gradients, signs, wanted)
            for index, second in zip(trained, seconds, strict=False):
                if second is not None and index in signs:
                    traces[index] += float((signs[index] * second).sum()) / probes
        observed = _all_taps(taps)
        for tap in observed:
            for power in (tap.value_power, tap.gradient_power):
                if power is not None:
                    power /= probes
        kinks = [k for r in taps.replayables.values() for k in find_kinks(r, generator)]
        taps.passes.now = Pass.SPREAD
        if kinks:
            _spread(taps, kinks, wanted, probes, generator)
        for replayable in taps.replayables.values():
            replayable.edges.clear()  # or the graph would live as long as the observation
        for tap in observed:
            if tap.spread_power is not None:
                tap.spread_power /= probes
    return Observation(
        loss=float(value.detach()),
        products=taps.products,
        replayables=taps.replayables,
        gradients={i: g.detach() for i, g in gradients.items()},
        traces=traces,
        kinks=kinks,
        loss_scale=_loss_scale(taps.products.values()),
    )


def _spread(
    taps: Taps, kinks: list[Kink], wanted: list[Tensor], probes: int, generator: torch.Generator
) -> None:
    """The passes back from the kinks, with weights c = slope / sqrt(elements)."""
    owners = [taps.replayables[kink.operator] for kink in kinks]
    edges = [owner.edges[kink.place] for owner, kink in zip(owners, kinks, strict=True)]
    values = [owner.inputs[kink.place].value for owner, kink in zip(owners, kinks, strict=True)]
    for _ in range(probes):
        weights = [
            _signs(value, generator) * (kink.slope / math.sqrt(value.numel()))
            for value, kink in zip(values, kinks, strict=True)
        ]
        torch.autograd.grad(edges, wanted, weights, retain_graph=True, allow_unused=True)


def require_finite(loss: Tensor, gradients: Iterable[Tensor]) -> None:
    """Refuse a step in fp32 that is no reference for anything.

    Raises:
        CaptureError: the loss or a gradient is not finite.
    """
    remedy = "Check the batch: labels out of range and empty masks are the usual reasons"
    if not bool(torch.isfinite(loss).all()):
        raise CaptureError(f"the loss is {float(loss)}", remedy)
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise CaptureError("a gradient is not finite in fp32", remedy)


def _require_second_derivatives(gradients: dict[int, Tensor]) -> None:
    """Refuse functions that say they have one derivative only.

    Autograd puts a node that raises behind them, but does not run it where it leads nowhere:
    the second derivative would silently be 0.
    """
    seen: set[object] = set()
    waiting: list[Any] = [gradient.grad_fn for gradient in gradients.values()]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == _RAISES:
            raise _once_only("a function is marked with once_differentiable")
        waiting.extend(following for following, _ in node.next_functions)


def _once_only(reason: str) -> CaptureError:
    return CaptureError(
        f"the step cannot be differentiated twice: {reason}",
        "Use the method `measured`, or write that part with torch functions",
    )


def _all_taps(taps: Taps) -> list[Tap]:
    found: list[Tap | None] = []
    for product in taps.products.values():
        found += [
            *product.operands,
            product.output,
            product.weight_forward,
            product.weight_backward,
        ]
    for replayable in taps.replayables.values():
        found += [*replayable.inputs, *replayable.outputs]
    return [tap for tap in found if tap is not None]


def _loss_scale(products: Iterable[Product]) -> float:
    largest = 0.0
    for product in products:
        for tap in (*product.operands, product.output):
            if tap is not None and tap.gradient is not None and tap.gradient.numel():
                largest = max(largest, float(tap.gradient.abs().max()))
    if largest == 0.0:
        return LARGEST_LOSS_SCALE
    return min(LARGEST_LOSS_SCALE, 2.0 ** math.floor(math.log2(_LARGEST_FP16 / largest)))


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
    return drawn.to(torch.float32) * 2 - 1


def _second(
    gradients: dict[int, Tensor], signs: dict[int, Tensor], wanted: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """The derivatives of <gradients, signs>; the taps take theirs as it passes."""
    curved = [index for index, gradient in gradients.items() if gradient.requires_grad]
    if not curved:
        return (None,) * len(wanted)
    try:
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            [gradients[index] for index in curved],
            wanted,
            [signs[index] for index in curved],
            retain_graph=True,
            allow_unused=True,
        )
    except RuntimeError as error:
        raise _once_only(str(error).splitlines()[0]) from error
    return found
