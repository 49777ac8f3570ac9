"""Layers against float64: noise floors, awkward shapes, overflow, formulas, saved bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import reference
from qsync_opt.kernels.rounding import RandomKey, Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime import operators
from qsync_opt.runtime.convert import convert, set_step
from qsync_opt.runtime.session import tensor_number
from tests.layer_cases import CASES, EIGHT_BITS, Case, floors, randn
from tests.low_precision import decibels


def converted(layer: nn.Module, precision: Precision, **options: Any) -> nn.Module:
    model = nn.Sequential(layer)
    convert(model, {"0": precision}, emulate=True, **options)
    return layer


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("precision", Precision)
def test_noise_stays_under_its_floor(
    precision: Precision,
    case: Case,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(1)
    layer = case[1]()
    exact = copy.deepcopy(layer).double()
    x = randn(*case[2]).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    out = converted(layer, precision)(x)
    expected = exact(wide)
    handed_on = {
        Precision.BF16: torch.bfloat16,
        Precision.FP16: torch.float16,
        Precision.FP32: torch.float32,
    }[precision.output]
    assert out.dtype is handed_on
    assert out.shape == expected.shape
    grad = randn(*out.shape, seed=2).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert x.grad is not None
    assert wide.grad is not None
    output, grad_input, grad_weight = floors(precision)
    # A gradient takes the dtype of what it is the gradient of.
    rounded = 6.02 * 8 - 2 if dtype is torch.bfloat16 else math.inf
    assert x.grad.dtype is dtype
    assert decibels(out, expected) >= output
    assert decibels(x.grad, wide.grad) >= min(grad_input, rounded)
    for (name, found), wanted in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert found.grad.dtype is torch.float32
        # Biases are summed in fp32 from the gradient as it came.
        floor = grad_weight if name == "weight" else floors(Precision.BF16)[2]
        assert decibels(found.grad, wanted.grad) >= floor


@pytest.mark.parametrize("precision", Precision)
def test_memory_layout_of_the_input_does_not_matter(precision: Precision) -> None:
    linear = converted(nn.Linear(24, 8), precision)
    x = randn(40, 48)[::2, ::2].t()[:, :15].t()
    assert not x.is_contiguous()
    assert torch.equal(linear(x), linear(x.contiguous()))
    conv = converted(nn.Conv2d(8, 4, 3), precision)
    images = randn(2, 8, 6, 7)
    for layout in (
        images.contiguous(memory_format=torch.channels_last),
        images.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert decibels(conv(layout), conv(images)) > floors(precision)[0] + 6


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("weight_layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "window"), [(8, 3), (8, 1), (1, 3), (1, 1)])
def test_convolutions_keep_the_layouts_that_torch_gives(
    channels: int,
    window: int,
    layout: torch.memory_format,
    weight_layout: torch.memory_format,
    precision: Precision,
) -> None:
    """Of the output, or later views would copy; of the weight's gradient, or DDP complains."""
    plain = nn.Conv2d(channels, 4, window, padding=window // 2)
    plain.to(memory_format=weight_layout)  # type: ignore[call-overload]
    x = randn(2, channels, 6, 7).contiguous(memory_format=layout).requires_grad_()
    expected = plain(x).stride()
    conv: Any = converted(plain, precision)
    out = conv(x)
    assert out.stride() == expected
    out.sum().backward()
    assert conv.weight.grad.stride() == conv.weight.stride()


@pytest.mark.parametrize("precision", Precision)
def test_empty_batches(precision: Precision) -> None:
    for layer, shape in (
        (nn.Linear(6, 5), (0, 6)),
        (nn.Linear(6, 5), (2, 0, 6)),
        (nn.Conv2d(3, 4, 3), (0, 3, 8, 8)),
        (nn.Conv2d(3, 4, 1), (0, 3, 8, 8)),
    ):
        x = torch.empty(shape, requires_grad=True)
        expected = layer(x).shape
        out = converted(layer, precision)(x)
        assert out.shape == expected
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert all(
            parameter.grad is not None and not parameter.grad.any()
            for parameter in layer.parameters()
        )


@pytest.mark.parametrize("precision", Precision)
def test_rows_of_zeros_give_the_bias(precision: Precision) -> None:
    layer = converted(nn.Linear(16, 4), precision)
    x = randn(5, 16)
    x[1] = 0
    x[3] = 0
    out = layer(x)
    bias = list(layer.parameters())[1].to(out.dtype)
    assert torch.equal(out[1], bias)
    assert torch.equal(out[3], bias)
    assert bool(torch.isfinite(converted(nn.Linear(16, 4), precision)(torch.zeros(2, 16))).all())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("precision", Precision)
def test_overflow_is_seen_in_the_output_and_in_gradients(
    precision: Precision, value: float
) -> None:
    for layer, shape in ((nn.Linear(8, 4), (3, 8)), (nn.Conv2d(2, 4, 3), (2, 2, 5, 5))):
        converted(layer, precision)
        x = randn(*shape)
        x.view(-1)[3] = value
        x.requires_grad_()
        out = layer(x)
        assert not bool(torch.isfinite(out).all())
        out.backward(torch.ones_like(out))
        assert not bool(torch.isfinite(layer.weight.grad).all())  # type: ignore[arg-type]
        layer.zero_grad()
        fine = randn(*shape).requires_grad_()
        out = layer(fine)
        assert bool(torch.isfinite(out).all())
        grad = torch.ones_like(out)
        grad[(0,) * grad.dim()] = value
        out.backward(grad)
        assert fine.grad is not None
        assert not bool(torch.isfinite(fine.grad).all())
        assert not bool(torch.isfinite(layer.weight.grad).all())  # type: ignore[arg-type]


def test_fp16_gradients_overflow_to_infinity_for_the_loss_scaler() -> None:
    layer = converted(nn.Linear(4, 4), Precision.FP16)
    nn.init.ones_(layer.weight)  # type: ignore[arg-type]
    x = randn(2, 4).requires_grad_()
    layer(x).backward(torch.full((2, 4), 6e4, dtype=torch.float16))
    assert x.grad is not None
    assert x.grad.tolist() == [[math.inf] * 4] * 2  # 4 * 6e4 is over 65504
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.clone()  # type: ignore[operator]
    for expected in (2.0**39, 2.0**38):
        optimizer.zero_grad()
        scaler.scale(layer(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert torch.equal(layer.weight, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", Precision)
def test_meta_tensors_give_shapes(precision: Precision) -> None:
    for build, shape in (
        (lambda: nn.Linear(6, 5, device="meta"), (3, 6)),
        (lambda: nn.Conv2d(4, 6, 3, device="meta"), (2, 4, 8, 8)),
        (lambda: nn.Conv2d(4, 6, 1, device="meta"), (2, 4, 8, 8)),
    ):
        layer = build()
        x = torch.empty(shape, device="meta", requires_grad=True)
        expected = layer(x).shape
        out = converted(layer, precision)(x)
        assert out.shape == expected
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert layer.weight.grad.shape == layer.weight.shape  # type: ignore[union-attr]


def test_float64_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"0\.weight: must have dtype float32"):
        converted(nn.Linear(4, 4).double(), Precision.BF16)
    with pytest.raises(ParameterError, match="input of 0: must have dtype"):
        converted(nn.Linear(4, 4), Precision.BF16)(torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("precision", Precision)
def test_embedding_hands_on_the_dtype_and_sums_gradients_in_fp32(precision: Precision) -> None:
    layer = nn.Embedding(12, 6, padding_idx=3)
    exact = copy.deepcopy(layer).double()
    indices = torch.tensor([[1, 3, 5], [1, 1, 11]])
    out = converted(layer, precision)(indices)
    assert out.dtype.itemsize == precision.output.element_bytes
    assert decibels(out, exact(indices)) > floors(precision.output)[0]
    grad = randn(2, 3, 6).to(out.dtype)
    out.backward(grad)
    exact(indices).backward(grad.double())
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    assert decibels(layer.weight.grad, exact.weight.grad) > floors(Precision.FP32)[0]
    assert not bool(layer.weight.grad[3].any())


def saved_bytes(run: Callable[[], Tensor], skip: set[int]) -> int:
    """Bytes of the storages that autograd keeps, without some storages."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())
    return sum(kept.values())


@pytest.mark.parametrize("precision", Precision)
def test_saved_bytes_are_what_the_dtype_says(precision: Precision) -> None:
    size = precision.storage.element_bytes
    for layer, x, scales in (
        (nn.Linear(48, 32), randn(64, 48), 64),
        (nn.Conv2d(16, 8, 3), randn(4, 16, 10, 10), 1),
    ):
        converted(layer, precision)
        x.requires_grad_()
        skip = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        if precision is Precision.FP8:
            scales = 1
        beside = 4 * scales if precision in EIGHT_BITS else 0
        assert saved_bytes(lambda: layer(x), skip) == x.numel() * size + beside  # noqa: B023


@pytest.mark.parametrize("precision", Precision)
def test_nothing_is_saved_for_gradients_that_nobody_needs(precision: Precision) -> None:
    layer = converted(nn.Linear(48, 32), precision)
    layer.requires_grad_(False)
    x = randn(64, 48).requires_grad_()
    skip = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert saved_bytes(lambda: layer(x), skip) == 0
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.requires_grad_(True)
    fixed = x.detach()
    layer(fixed).sum().backward()
    assert layer.weight.grad is not None


def quantized(x: Tensor, precision: Precision, gradient: bool = False) -> Tensor:
    """The float64 values that an operand is rounded to; rows are rows of the product."""
    if precision is Precision.INT8:
        q, scale = reference.quantize_int8(x.float(), "row")
    else:
        q, scale = reference.quantize_fp8(x.float(), "e5m2" if gradient else "e4m3", "tensor")
    return q.double() * scale.double()


def test_fp8_backward_is_the_formula_on_rounded_operands() -> None:
    x, weight, grad = randn(20, 24), randn(12, 24, seed=1), randn(20, 12, seed=2).bfloat16()
    layer = nn.Linear(24, 12, bias=False)
    layer.weight.data.copy_(weight)
    x.requires_grad_()
    converted(layer, Precision.FP8)(x).backward(grad)
    rounded_x, rounded_weight = (quantized(t.detach(), Precision.FP8) for t in (x, weight))
    rounded_grad = quantized(grad, Precision.FP8, gradient=True)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert decibels(x.grad, rounded_grad @ rounded_weight) > floors(Precision.BF16)[0]
    assert decibels(layer.weight.grad, rounded_grad.t() @ rounded_x) > floors(Precision.FP32)[0]


def test_int8_backward_is_the_formula_on_rounded_operands() -> None:
    x, weight, grad = randn(20, 24), randn(12, 24, seed=1), randn(20, 12, seed=2).bfloat16()
    layer = nn.Linear(24, 12, bias=False)
    layer.weight.data.copy_(weight)
    x.requires_grad_()
    converted(layer, Precision.INT8)(x).backward(grad)
    kept = quantized(x.detach(), Precision.INT8).bfloat16().double()
    assert x.grad is not None
    assert layer.weight.grad is not None
    wide = grad.double() @ weight.bfloat16().double()
    assert decibels(x.grad, wide) > floors(Precision.BF16)[0]
    assert decibels(layer.weight.grad, grad.double().t() @ kept) > floors(Precision.FP32)[0]


def test_fp8_convolutions_do_not_overflow_where_the_half_is_fp16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of codes reach 448 x 448 times the terms before they are scaled."""
    model = nn.Sequential(nn.Conv2d(64, 8, 3))
    exact = copy.deepcopy(model).double()
    convert(model, {"0": Precision.FP8}, emulate=True)
    monkeypatch.setattr(operators, "half_dtype", lambda device: torch.float16)
    x = randn(2, 64, 8, 8)
    out, expected = model(x), exact(x.double())
    assert out.dtype is torch.float16
    assert decibels(out, expected) > floors(Precision.FP8)[0]
    out.backward(torch.ones_like(out))
    expected.backward(torch.ones_like(expected))
    found, wanted = (m[0].weight.grad for m in (model, exact))
    assert decibels(found, wanted) > floors(Precision.FP8)[2]  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", list(Precision))
def test_weights_of_another_dtype_are_cast(precision: Precision) -> None:
    """FSDP's mixed precision, or `functional_call`, hands them over."""
    model = convert(nn.Sequential(nn.Linear(8, 8)), {"0": precision}, emulate=True)
    half = {name: value.bfloat16() for name, value in model.state_dict().items()}
    wide = {name: value.float() for name, value in half.items()}
    x = randn(4, 8)
    found, expected = (torch.func.functional_call(model, values, x) for values in (half, wide))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_stochastic_weight_gradients_are_right_on_average(precision: Precision) -> None:
    # One scale for everything, a power of two, and values that bf16 holds: what is left is
    # the rounding of x (and, for fp8, of the gradient), which must average out.
    x = torch.rand(8, 16, generator=torch.Generator().manual_seed(0))
    largest = 127.0 if precision is Precision.INT8 else 448.0
    x = (x * largest).bfloat16().float()
    x[:, 0] = largest
    grad = randn(8, 4, seed=2).bfloat16()
    layer = nn.Linear(16, 4, bias=False)
    model = nn.Sequential(layer)
    convert(model, {"0": precision}, rounding=Rounding.STOCHASTIC, emulate=True)
    draws = []
    for step in range(600):
        set_step(model, step)
        layer.zero_grad()
        model(x).backward(grad)
        assert layer.weight.grad is not None
        draws.append(layer.weight.grad.double())
    found = torch.stack(draws)
    exact = grad.double().t() @ x.double()
    deviation = found.std(0) / math.sqrt(len(draws))
    rounding_of_sums = 2.0**-8 * (grad.double().abs().t() @ x.double()) * 2**-8
    assert bool(((found.mean(0) - exact).abs() <= 5 * deviation + rounding_of_sums).all())
    assert float(found.std(0).max()) > 0


def test_stochastic_rounding_follows_seed_step_rank_and_operator() -> None:
    weight, x = randn(16, 32), randn(8, 32, seed=1)

    def run(seed: int = 0, step: int = 0, rank: int = 0, name: str = "first") -> Tensor:
        layer = nn.Linear(32, 16, bias=False)
        layer.weight.data.copy_(weight)
        model = nn.Sequential()
        model.add_module(name, layer)
        convert(model, {name: Precision.INT8}, rounding=Rounding.STOCHASTIC, seed=seed, rank=rank)
        set_step(model, step)
        return model(x)  # type: ignore[no-any-return]

    base = run()
    assert torch.equal(base, run())
    for other in (run(seed=1), run(step=1), run(rank=1), run(rank=2), run(name="second")):
        assert not torch.equal(base, other)
    key = RandomKey(seed=0, step=0, tensor=tensor_number("first"))
    codes, scale = reference.quantize_int8(x, "row", Rounding.STOCHASTIC, key)
    weight_key = RandomKey(seed=0, step=0, tensor=tensor_number("first") + 1)
    weight_codes, weight_scale = reference.quantize_int8(
        weight, "row", Rounding.STOCHASTIC, weight_key
    )
    operands = (codes, weight_codes, scale, weight_scale)
    assert torch.equal(base, reference.int8_matmul(*operands, None, torch.bfloat16))


def test_stochastic_rounding_without_a_step_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model, {"0": Precision.INT8}, rounding=Rounding.STOCHASTIC)
    with pytest.raises(ParameterError, match="set_step"):
        model(randn(2, 4))


def test_true_fp32_does_not_follow_the_flags_of_the_process() -> None:
    x, layer = randn(32, 256), nn.Linear(256, 32)
    exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    converted(layer, Precision.FP32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        out = layer(x)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert decibels(out, exact) > floors(Precision.FP32)[0]
