"""Published indicators, from one observed step: what they rank is worth comparing.

Each fills a table [N, P] for the adjustable operators; the quantisers are those of the layers
(`rounding_noise`), and E e^2 stands for the power of a rounding error, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.flows import Product, Tap
from qsync_opt.measure.moments import Observation
from qsync_opt.measure.rounding_noise import Form, Part, gradient_noise, value_noise
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.precision import Precision

#: QSync: "k" of a floating-point format, one less than the bits of its mantissa.
_QSYNC_BITS = {Precision.TF32: 9, Precision.BF16: 6, Precision.FP16: 9, Precision.FP8: 2}
_QSYNC_FIXED_BITS = 9  # of the 16-bit gradients beside int8
_QSYNC_LARGEST_EXPONENT = 5
_QSYNC_GAMMA = 1.0
_INT8_MAX = 127


def published_variance(
    observation: Observation,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    rounding: Rounding,
) -> FloatArray:
    """QSync's indicator as its authors' code has it (arXiv 2407.02327, indicator.py).

        w = gamma * (L - d) * forward + d * backward

    with d the depth of the operator and L the largest. X, W: input and weight with D_x and D_w
    elements, G: gradient of the weight, D_y: elements of the output; |.| Frobenius norms (the
    proof asks for squared ones, the code does not square them); s = amax / 127; e: exponent of
    the root of norm over elements, at most 5; k: bits of the mantissa less 1. The factor 1/6
    stands for stochastic rounding.

        int8   forward  = 1/6 (|W| s_x^2 D_x + |X| s_w^2 D_w)
               backward = 1/6 (|G| s_x^2 D_x + |X| 2^(2 e_x - 2 k) D_y)
        float  forward  = 1/6 2^(-2k) (|W| D_x e_x + |X| D_w e_w)
               backward = 1/6 2^(-2k) (|G| D_x e_x + |X| D_y e_g)

    A look-up has its table for X and no weight. Operators of activations alone have
    forward = 1/6 s_x D_x (int8) or 2^(4 (e_x - k)) D_x, and backward = 0. gamma, which the
    code leaves to its caller, is 1. The unit is none that adds up.
    """
    depths = _depths(graph)
    largest = max(depths)

    def entry(product: Product, precision: Precision) -> float:
        parts = {tap.part: tap for tap in product.operands}
        depth = depths[product.operator]
        x, w = parts.get(Part.INPUT), parts.get(Part.WEIGHT)
        if product.layout.form is Form.EMBEDDING:
            x, w = w, None
        if x is None:
            return 0.0
        x_norm, x_count, x_scale, x_exponent = _qsync_moments(x.value)
        y_count = product.output.value.numel() if product.output is not None else 0
        if w is None and product.layout.form is not Form.EMBEDDING:
            if precision is Precision.INT8:
                return _QSYNC_GAMMA * (largest - depth) * x_scale * x_count / 6
            power = 2.0 ** (4 * (x_exponent - _QSYNC_BITS[precision]))
            return _QSYNC_GAMMA * (largest - depth) * power * x_count
        w_norm, w_count, w_scale, w_exponent = (
            (1.0, 1, 1.0, 1) if w is None else _qsync_moments(w.value)
        )
        gradient = (x if w is None else w).gradient
        g_norm, _, _, g_exponent = (
            (0.0, 0, 0.0, 0) if gradient is None else _qsync_moments(gradient, largest=True)
        )
        if precision is Precision.INT8:
            forward = w_norm * x_scale**2 * x_count + x_norm * w_scale**2 * w_count
            rounded = 2.0 ** (2 * x_exponent - 2 * _QSYNC_FIXED_BITS)
            backward = g_norm * x_scale**2 * x_count + x_norm * rounded * y_count
        else:
            share = 2.0 ** (-2 * _QSYNC_BITS[precision])
            forward = share * (w_norm * x_count * x_exponent + x_norm * w_count * w_exponent)
            backward = share * (g_norm * x_count * x_exponent + x_norm * y_count * g_exponent)
        return (_QSYNC_GAMMA * (largest - depth) * forward + depth * backward) / 6

    return _table(observation, graph, precisions, entry)


def hessian(
    observation: Observation,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    rounding: Rounding,
) -> FloatArray:
    """HAWQ-V2 (arXiv 1911.03852): mean eigenvalue of the weight's Hessian x its squared error.

        w = max(0, tr(H_w) / n_w) * sum_i E e_i^2,   tr(H_w) by Hutchinson's estimator

    with n_w elements in the weight w of the operator and e the error of rounding w. It is an
    estimate of twice the added loss; its unit is that of the loss. Operators without a weight,
    and weights along which the loss curves down, get 0.
    """

    def entry(product: Product, precision: Precision) -> float:
        total = 0.0
        for number, tap in zip(product.layout.parts, product.operands, strict=True):
            inputs = graph.operators[product.operator].inputs
            parameter = graph.tensors[inputs[number]].parameter
            if tap.part is not Part.WEIGHT or parameter is None:
                continue
            curvature = max(0.0, observation.traces.get(parameter, 0.0) / tap.value.numel())
            ones = torch.ones_like(tap.value)
            layout = product.layout
            total += curvature * value_noise(layout, tap.part, precision, tap.value, ones, rounding)
        return total

    return _table(observation, graph, precisions, entry)


def loss_error(
    observation: Observation,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    rounding: Rounding,
) -> FloatArray:
    """Mean square error of the loss to first order (after arXiv 2505.13060).

        w = sum_t sum_i (dL/dt_i)^2 * E e_ti^2

    over the operands t that the operator rounds on the way forward, from one forward and one
    backward pass in fp32. Unit: that of a squared loss.
    """

    def entry(product: Product, precision: Precision) -> float:
        return sum(_loss_error_of(tap, product, precision, rounding) for tap in product.operands)

    return _table(observation, graph, precisions, entry)


def divergence(
    observation: Observation,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    rounding: Rounding,
) -> FloatArray:
    """Loss divergence forward plus weight divergence backward (after SNIP, arXiv 2602.01410).

        w = sqrt(loss error) / |L|  +  sqrt(E |dG_w|^2) / |w|

    The first term is `loss_error` relative to the loss L. The second is the error of the
    operator's own weight gradient relative to the weight w: for a product with input X and
    output gradient G, E |dG_w|^2 = sum_i E e_Xi^2 a_i + sum_j E e_Gj^2 b_j, where a_i sums the
    squares of the elements of G that X_i is multiplied with, and b_j those of X. What the
    gradient's error does to other layers is left out. No unit.
    """

    def entry(product: Product, precision: Precision) -> float:
        error = sum(_loss_error_of(tap, product, precision, rounding) for tap in product.operands)
        forward = math.sqrt(error) / abs(observation.loss) if observation.loss else 0.0
        return forward + _weight_divergence(product, precision, rounding, observation.loss_scale)

    return _table(observation, graph, precisions, entry)


def random_table(graph: OperatorGraph, precisions: Sequence[Precision], seed: int) -> FloatArray:
    """A random order of the operators: uniform numbers, larger for coarser precisions.

    An operator's number is multiplied by the squared rounding error of the precision,
    relative: 2^(-2 bits) with the bits of the mantissa and the sign.
    """
    bits = {
        Precision.TF32: 11,
        Precision.FP16: 11,
        Precision.BF16: 8,
        Precision.INT8: 7,
        Precision.FP8: 4,
    }
    drawn = np.random.default_rng(seed).uniform(size=len(graph.operators))
    table = np.zeros((len(graph.operators), len(precisions)))
    for column, precision in enumerate(precisions):
        if precision is not Precision.FP32:
            for index in graph.adjustable:
                table[index, column] = drawn[index] * 4.0 ** -bits[precision]
    return table


def _table(
    observation: Observation,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    entry: Callable[[Product, Precision], float],
) -> FloatArray:
    table = np.zeros((len(graph.operators), len(precisions)))
    for index, product in observation.products.items():
        for column, precision in enumerate(precisions):
            if precision not in product.layout.precisions:
                table[index, column] = math.inf
            elif precision is not Precision.FP32 and not _changes_nothing(product, precision):
                value = entry(product, precision)
                table[index, column] = math.inf if math.isnan(value) else value
    return table


def _changes_nothing(product: Product, precision: Precision) -> bool:
    return product.layout.form is Form.EMBEDDING and precision.output is Precision.FP32


def _loss_error_of(tap: Tap, product: Product, precision: Precision, rounding: Rounding) -> float:
    if tap.gradient is None:
        return 0.0
    power = tap.gradient.square()
    return value_noise(product.layout, tap.part, precision, tap.value, power, rounding)


def _weight_divergence(
    product: Product, precision: Precision, rounding: Rounding, loss_scale: float
) -> float:
    numbers = {tap.part: n for n, tap in zip(product.layout.parts, product.operands, strict=True)}
    parts = {tap.part: tap for tap in product.operands}
    x, w, y = parts.get(Part.INPUT), parts.get(Part.WEIGHT), product.output
    if x is None or w is None or y is None or y.gradient is None:
        return 0.0
    size = float(w.value.norm())
    if size == 0.0:
        return 0.0
    # Products are linear in each operand, so squares in give sums of squares out.
    squares = {numbers[Part.INPUT]: x.value.square().requires_grad_()}
    squares[numbers[Part.WEIGHT]] = torch.ones_like(w.value)
    if Part.BIAS in numbers:
        squares[numbers[Part.BIAS]] = torch.zeros_like(parts[Part.BIAS].value)
    with torch.enable_grad():
        sums: Tensor = product.run(squares)
        (meets,) = torch.autograd.grad(sums, squares[numbers[Part.INPUT]], y.gradient.square())
    layout = product.layout
    error = value_noise(layout, x.part, precision, x.value, meets, rounding)
    error += gradient_noise(
        layout,
        y.part,
        precision,
        y.gradient,
        sums.detach(),
        loss_scale=loss_scale,
        rounding=rounding,
    )
    return math.sqrt(error) / size


def _qsync_moments(x: Tensor, *, largest: bool = False) -> tuple[float, int, float, int]:
    """Norm, elements, int8 scale, and exponent as QSync takes them."""
    norm = float(x.norm())
    count = x.numel()
    amax = float(x.abs().max()) if count else 0.0
    typical = amax if largest else math.sqrt(norm / count) if count else 0.0
    exponent = abs(math.frexp(typical)[1])
    return norm, count, amax / _INT8_MAX, min(exponent, _QSYNC_LARGEST_EXPONENT)


def _depths(graph: OperatorGraph) -> list[int]:
    """How many products stand on the longest way to each operator, itself included."""
    depths: list[int] = []
    for index, operator in enumerate(graph.operators):
        producers = [graph.tensors[tensor].producer for tensor in operator.inputs]
        before = max((depths[p] for p in producers if p is not None), default=0)
        multiplies = operator.role is Role.ADJUSTABLE and graph.signature_of(index).parts
        depths.append(before + (1 if multiplies else 0))
    return depths
