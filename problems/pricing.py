"""Roofline prices of one layer on one GPU: seconds, bytes and a synthetic perturbation.

A kernel takes max(operations / (E_c peak), bytes moved / (E_m bandwidth)) + launch. The
efficiencies are round figures, the same for every GPU, not measurements: they make the
instances realistic in shape and reproducible everywhere, and no prediction of a real step.

Products. Lowering one reads the fp32 weight and writes its copy (8-bit formats read twice:
for the largest magnitude, then to round). Backward is two products, grad_input and
grad_weight; the first layer needs only the second. The int8 layer has an int8 output product
and 16-bit gradients (bf16, or fp16 without bf16); the fp8 layer is fp8 in all three.

Perturbation. In the form of QSync's variance indicator (arXiv 2407.02327): the variance of
the rounding error, relative to the squared value, times the elements rounded, times a depth
factor. With X, W, Y the elements of input, weight and output for one worker's batch of b,

    w = 10^9 [ depth . s(p) (X / b^2 + W) + g(p) Y / b^2 ] / parameters

(parts per billion, so that sums stay far above a solver's absolute tolerances), where s is the
relative variance in forward operands, g in the output's gradient, and depth the share of
adjustable layers from this one on. Rounding a significand of m bits has relative variance
(2^-m)^2 / 3 at most; an int8 code with one scale of 4 standard deviations has (4 / 127)^2 / 12.
fp32 counts as 0. It is synthetic: no gradient was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qsync_opt.precision import Precision

if TYPE_CHECKING:
    from problems.gpus import Gpu
    from problems.shapes import Layer

COMPUTE_EFFICIENCY = 0.6
MEMORY_EFFICIENCY = 0.8
LAUNCH_S = 5e-6
_PARTS = 1e9

#: Significand bits with the hidden one, operands of the forward product.
_FLOAT_BITS = {Precision.TF32: 11, Precision.FP16: 11, Precision.BF16: 8, Precision.FP8: 4}
_INT8_VARIANCE = (4 / 127) ** 2 / 12
_FP8_GRADIENT_BITS = 3  # e5m2

#: How often a pointwise kernel passes over its elements, forward and backward.
_PASSES = {
    "batch_norm": (3, 5),
    "layer_norm": (3, 5),
    "rms_norm": (3, 5),
    "softmax": (3, 3),
    "cross_entropy": (3, 2),
    "relu": (2, 3),
    "gelu": (2, 3),
    "silu": (2, 3),
    "mul": (3, 5),
    "add": (3, 3),  # backward: the gradients of the two branches meet
    "rotary": (2, 2),
    "dropout": (2, 2),
    "max_pool": (1, 1),
    "avg_pool": (1, 1),
    "embedding": (2, 2),
}


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """Prices layers on one GPU for a network with `batch` samples a worker.

    Attributes:
        gpu: the device.
        sixteen: the 16-bit dtype that int8 and fp8 products hand on here.
        batch: samples of one worker.
        parameters: trainable elements of the network.
    """

    gpu: Gpu
    sixteen: Precision
    batch: int
    parameters: int

    def output(self, precision: Precision) -> Precision:
        """The dtype that an operator at this precision hands on."""
        if precision in (Precision.INT8, Precision.FP8):
            return self.sixteen
        return precision.storage

    def options(self, layer: Layer) -> tuple[Precision, ...]:
        """Precisions that a layer has on this GPU."""
        if layer.role == "fixed":
            return (Precision.FP32,)
        floats = [p for p in self.gpu.flops if p.element_bytes > 1]
        if layer.role == "follower":
            return tuple(p for p in floats if p is not Precision.TF32)
        # Batched products of two activations have no 8-bit layer.
        return tuple(floats) if not layer.weight_elements else tuple(self.gpu.flops)

    def _product_s(self, macs: int, precision: Precision, traffic: float) -> float:
        compute = 2 * macs / (COMPUTE_EFFICIENCY * self.gpu.flops[precision])
        return max(compute, self.traffic_s(traffic)) + LAUNCH_S

    def traffic_s(self, size_bytes: float) -> float:
        """Time to move bytes through the GPU's memory, seconds."""
        return size_bytes / (MEMORY_EFFICIENCY * self.gpu.memory_bytes_per_s)

    def forward_s(self, layer: Layer, precision: Precision) -> float:
        """Forward time of a layer, seconds."""
        if layer.kind == "input":
            return 0.0
        if layer.kind == "all_reduce":
            return self._reduce_s(layer, precision)
        size = precision.element_bytes
        if layer.role != "adjustable":
            return self._passes_s(layer, size, _PASSES[layer.kind][0])
        written = self.output(precision).element_bytes * layer.output_elements
        traffic = size * (layer.input_elements + layer.weight_elements) + written
        return self._product_s(layer.macs, precision, traffic) + self._weight_s(layer, precision)

    def backward_s(self, layer: Layer, precision: Precision, *, first: bool) -> float:
        """Backward time of a layer, seconds; `first` needs no gradient of its input."""
        if layer.kind == "input":
            return 0.0
        if layer.kind == "all_reduce":
            return self._reduce_s(layer, precision)
        if layer.role != "adjustable":
            return self._passes_s(layer, precision.element_bytes, _PASSES[layer.kind][1])
        runs_at = self.output(precision) if precision is Precision.INT8 else precision
        size = runs_at.element_bytes
        x, w, y = layer.input_elements, layer.weight_elements, layer.output_elements
        total = self._product_s(layer.macs, runs_at, size * (x + y) + 4 * w)
        if not first:
            total += self._product_s(layer.macs, runs_at, size * (x + y + w))
        if precision is Precision.INT8:  # the saved int8 activation is expanded again
            total += self.traffic_s((1 + size) * x) + LAUNCH_S
        if precision is Precision.FP8:  # the gradient is rounded to fp8
            total += self.traffic_s((2 * self.sixteen.element_bytes + 1) * y) + LAUNCH_S
        return total

    def _reduce_s(self, layer: Layer, precision: Precision) -> float:
        share = 2 * (layer.ranks - 1) / layer.ranks
        size = precision.element_bytes * layer.output_elements
        return share * size / self.gpu.peer_bytes_per_s + LAUNCH_S

    def _passes_s(self, layer: Layer, size: int, passes: int) -> float:
        elements = layer.output_elements
        if layer.kind in ("max_pool", "avg_pool"):
            elements += layer.input_elements
        return self.traffic_s(passes * size * elements + layer.mask_bytes) + LAUNCH_S

    def _weight_s(self, layer: Layer, precision: Precision) -> float:
        if precision.storage is Precision.FP32 or not layer.weight_elements:
            return 0.0
        reads = 2 if precision.element_bytes == 1 else 1
        traffic = (4 * reads + precision.element_bytes) * layer.weight_elements
        return self.traffic_s(traffic) + LAUNCH_S

    def cast_s(self, elements: int, source: Precision, target: Precision) -> float:
        """Time to cast a tensor between dtypes, seconds; 8-bit targets read it twice."""
        if source is target:
            return 0.0
        reads = 2 if target.element_bytes == 1 else 1
        traffic = (reads * source.element_bytes + target.element_bytes) * elements
        return self.traffic_s(traffic) + LAUNCH_S

    def forward_transient_bytes(self, layer: Layer, precision: Precision) -> int:
        """Output and low-precision weight, held at least while the layer runs."""
        written = self.output(precision).element_bytes * layer.output_elements
        if precision.storage is Precision.FP32:
            return written
        return written + precision.element_bytes * layer.weight_elements

    def backward_transient_bytes(self, layer: Layer, precision: Precision) -> int:
        """Gradients of output and input, the lowered weight, and an expanded int8 input."""
        size = self.output(precision).element_bytes
        total = size * (layer.output_elements + layer.input_elements)
        if precision.storage is not Precision.FP32:
            total += size * layer.weight_elements
        if precision is Precision.INT8:
            total += size * layer.input_elements
        return total

    def perturbation(self, layer: Layer, precision: Precision, depth: float) -> float:
        """Synthetic gradient variance of a layer at a precision; see the module."""
        if layer.role != "adjustable" or precision is Precision.FP32:
            return 0.0
        samples = self.batch**2
        rounded = layer.input_elements / samples + layer.weight_elements
        forward = depth * _variance(precision) * rounded
        if precision is Precision.FP8:
            gradient = _float_variance(_FP8_GRADIENT_BITS)
        elif precision is Precision.INT8:
            gradient = _variance(self.sixteen)
        else:
            gradient = _variance(precision)
        backward = gradient * layer.output_elements / samples
        return _PARTS * (forward + backward) / self.parameters


def _float_variance(bits: int) -> float:
    return 4.0**-bits / 3


def _variance(precision: Precision) -> float:
    if precision is Precision.INT8:
        return _INT8_VARIANCE
    return _float_variance(_FLOAT_BITS[precision])
