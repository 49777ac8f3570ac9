"""Converted layers on a GPU: noise floors, flags, memory, streams, compilation and training.

Without the compiled kernels the reference runs, so that only a GPU is needed.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions
from qsync_opt.runtime.convert import convert
from qsync_opt.runtime.layers import STATE
from tests.layer_cases import CASES, Case, Pair, floors, randn
from tests.low_precision import (
    Attention,
    TinyGpt,
    decibels,
    gradients,
    language_loss,
    tokens,
    uniform_plan,
)
from tests.training_runs import curve, tail

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parents[1] / "golden" / "training_curves_h200.json"
STEPS = 200
BANDS = {
    Precision.FP32: 0.005,
    Precision.TF32: 0.01,
    Precision.BF16: 0.01,
    Precision.FP16: 0.01,
    Precision.FP8: 0.03,
    Precision.INT8: 0.02,
}

LARGE: list[Case] = [
    ("large", lambda: nn.Linear(1024, 768), (2048, 1024)),
    ("channels", lambda: nn.Conv2d(128, 128, 3, padding=1), (4, 128, 28, 28)),
    ("large pointwise", lambda: nn.Conv2d(256, 128, 1, bias=False), (4, 256, 14, 14)),
]


@pytest.fixture(params=list(Precision))
def precision(request: pytest.FixtureRequest, device: torch.device) -> Precision:
    if request.param not in available_precisions(device):
        pytest.skip(f"{request.param} is not on {torch.cuda.get_device_name(device)}")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[False, True], ids=["flags off", "flags on"])
def flags(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The process allows tf32, or not; what it said is still so afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    assert torch.backends.cuda.matmul.allow_tf32 is request.param
    assert torch.backends.cudnn.allow_tf32 is request.param
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def converted(layer: nn.Module, precision: Precision) -> nn.Module:
    convert(nn.Sequential(layer), {"0": precision})
    return layer


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case[0])
def test_noise_stays_under_its_floor(
    precision: Precision,
    case: Case,
    layout: torch.memory_format,
    flags: bool,
    device: torch.device,
) -> None:
    torch.manual_seed(1)
    layer = case[1]().to(device)
    exact = copy.deepcopy(layer).double()
    x = randn(*case[2]).to(device)
    if x.dim() == 4:
        x = x.contiguous(memory_format=layout)
    wide = x.double().requires_grad_()
    x.requires_grad_()
    out, expected = converted(layer, precision)(x), exact(wide)
    assert out.dtype.itemsize == precision.output.element_bytes
    grad = randn(*out.shape, seed=2).to(device, out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    # grad_weight sums over rows or pixels, the others over columns or channels and taps.
    terms = max(100, out.numel() // out.shape[1 if out.dim() == 4 else -1], layer.weight[0].numel())  # type: ignore[index]
    output, grad_input, grad_weight = floors(precision, terms)
    assert x.grad is not None
    assert wide.grad is not None
    found = {
        "output": (decibels(out, expected), output),
        "grad_input": (decibels(x.grad, wide.grad), grad_input),
        "grad_weight": (
            decibels(layer.weight.grad, exact.weight.grad),  # type: ignore[arg-type]
            grad_weight,
        ),
    }
    assert all(value >= floor for value, floor in found.values()), found
    if precision is Precision.TF32 and case[0] in ("large", "channels"):
        assert max(value for value, _ in found.values()) < floors(Precision.FP32)[0], found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.TF32])
def test_layers_in_cpp_give_the_same_as_those_in_python(
    precision: Precision,
    case: Case,
    layout: torch.memory_format,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    told = []
    for model in Pair(case[1]().to(device), monkeypatch, precision):
        x = randn(*case[2]).to(device, torch.bfloat16)
        if x.dim() == 4:
            x = x.contiguous(memory_format=layout)
        out = model(x.requires_grad_())
        out.backward(randn(*out.shape, seed=2).to(out))
        told.append((out, x.grad, *(p.grad for p in model.parameters())))
    for found, expected in zip(*told, strict=True):
        assert found is not None
        assert expected is not None
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        if found is told[0][1] and case[0] == "reflect":
            # torch adds up the gradients of reflected pixels in 16 bits, in an order that changes.
            off = (found.float() - expected.float()).abs().max()
            assert off <= 2**-7 * expected.float().abs().max()
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("tf32", [False, True])
def test_attention_and_products_keep_fp32_and_tf32_apart(
    tf32: bool, flags: bool, device: torch.device
) -> None:
    precision = Precision.TF32 if tf32 else Precision.FP32
    torch.manual_seed(0)
    model = Attention(64, 4).to(device)
    exact = copy.deepcopy(model).double()
    x = randn(4, 64, 64).to(device)
    convert(model, uniform_plan(model, precision))
    out, expected = model(x), exact(x.double())
    grad = randn(*out.shape, seed=1).to(device)
    out.backward(grad)
    expected.backward(grad.double())
    worst = min(
        decibels(found.grad, wanted.grad)  # type: ignore[arg-type]
        for found, wanted in zip(model.parameters(), exact.parameters(), strict=True)
        if wanted.grad is not None and float(wanted.grad.abs().max()) > 1e-6
    )
    low, high = (50.0, 95.0) if tf32 else (100.0, math.inf)
    assert low < decibels(out, expected) < high
    assert low < worst < high


def test_saved_memory_falls_as_the_dtype_says(precision: Precision, device: torch.device) -> None:
    for layer, shape, scales in (
        (nn.Linear(1024, 8), (4096, 1024), 4096),
        (nn.Conv2d(64, 4, 1, stride=4), (8, 64, 64, 64), 1),
    ):
        layer.to(device)
        converted(layer, precision)
        x = randn(*shape).to(device).contiguous()
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        cache = vars(layer)[STATE].session.cache
        for _ in range(2):  # libraries take their workspaces
            layer(x).sum().backward()
        layer.zero_grad()
        cache.clear()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = layer(x)
        cache.clear()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()
        size = precision.storage.element_bytes
        elements = x.numel()
        if isinstance(layer, nn.Conv2d) and precision is Precision.FP8:
            elements //= 16  # a pointwise product reads, and keeps, only what its stride picks
        copies = 0 if size == 4 else elements * size
        beside = 4 * scales if precision is Precision.INT8 else 0
        assert copies <= kept <= copies + beside + 4096, (kept, copies)
        del out


def test_nothing_waits_for_the_device(precision: Precision, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1), nn.Flatten()
    ).append(nn.Linear(16 * 64, 32))
    model.to(device)
    convert(model, uniform_plan(model, precision))
    x = randn(4, 8, 8, 8).to(device)
    model(x).float().sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_do_not_share_casts(device: torch.device) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)).to(device)
    convert(layers, {"0": Precision.INT8, "1": Precision.INT8})
    cache: Any = vars(layers[0])[STATE].session.cache
    x = randn(128, 64).to(device)
    expected = [layer(x) for layer in layers]
    assert len(cache) == 1
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = layers[1](x)
    side.synchronize()
    assert len(cache) == 2
    assert torch.equal(found, expected[1])


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_the_plan_wins_over_autocast(
    precision: Precision, autocast: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    convert(model, uniform_plan(model, precision))
    x = randn(64, 32).to(device)
    found = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cuda", autocast, enabled=enabled):
            out = model(x)
            out.float().sum().backward()
        found.append([out, *gradients(model).values()])
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore")  # what the compiler says is not the matter here
def test_compiled_code_computes_the_same(
    precision: Precision, flags: bool, device: torch.device
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).to(device)
    convert(model, uniform_plan(model, precision))
    x, found = randn(96, 64).to(device), []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        out = run(x)
        out.float().square().mean().backward()
        found.append([out.detach(), *gradients(model).values()])
    ratios = [decibels(second, first) for first, second in zip(*found, strict=True)]
    assert min(ratios) >= floors(precision)[1], ratios


def test_a_language_model_runs_at_every_precision(
    precision: Precision, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = TinyGpt(width=64, layers=2).to(device)
    exact = copy.deepcopy(model).double()
    batch = tokens(8).to(device)
    convert(model, uniform_plan(model, precision))
    out = model(batch)
    language_loss(out, batch).backward()
    expected = exact(batch)
    language_loss(expected, batch).backward()
    assert decibels(out, expected) >= floors(precision)[0] - 12
    found, wanted = (
        torch.cat([p.grad.flatten().double() for p in m.parameters() if p.grad is not None])
        for m in (model, exact)
    )
    assert decibels(found, wanted) >= min(floors(precision)) - 16


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_training_keeps_to_the_curve_of_fp32(
    name: str, precision: Precision, device: torch.device, record: dict[str, Any]
) -> None:
    found = curve(name, precision, steps=STEPS, device="cuda", width=64)
    plain = record.setdefault(name, {}).setdefault(
        "fp32", curve(name, None, steps=STEPS, device="cuda", width=64)
    )
    record[name][str(precision)] = found
    learned = plain[0] - tail(plain)
    assert learned > 0.5
    assert abs(tail(found) - tail(plain)) <= BANDS[precision] * learned
    if GOLDEN.exists():
        golden = json.loads(GOLDEN.read_text())["curves"][name]
        assert abs(tail(plain) - tail(golden)) <= 2 * BANDS[precision] * learned


@pytest.fixture(scope="module")
def record() -> Iterator[dict[str, Any]]:
    """Curves seen; written as golden file to the path that QSYNC_OPT_CURVES names, if any."""
    curves: dict[str, Any] = {}
    yield curves
    path = os.environ.get("QSYNC_OPT_CURVES")
    if path:
        origin = {
            "what": "training loss of the small models of tests/low_precision.py in fp32",
            "written_by": "pytest tests/kernels/test_layers_gpu.py with QSYNC_OPT_CURVES set",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "steps": STEPS,
        }
        ends = {
            model: {precision: round(tail(losses), 5) for precision, losses in found.items()}
            for model, found in curves.items()
        }
        rounded = {
            model: [float(f"{loss:.6g}") for loss in found["fp32"]]
            for model, found in curves.items()
        }
        text = json.dumps({**origin, "last_losses": ends, "curves": rounded})
        Path(path).write_text(text + "\n")
