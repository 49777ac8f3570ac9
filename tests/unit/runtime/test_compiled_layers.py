"""Layers in C++ do what the same functions do in Python, to the bit."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from qsync_opt.errors import KernelError
from qsync_opt.kernels import build, host_library
from qsync_opt.precision import Precision
from qsync_opt.runtime import operators
from qsync_opt.runtime.convert import convert
from tests.layer_cases import CASES, Case, Pair, randn

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if build.find_host_compiler() is None:
        pytest.skip("there is no C++ compiler")
    assert host_library.compiled_layers() is not None


def name_of_node(out: Tensor) -> str:
    return out.grad_fn.name() if out.grad_fn is not None else ""


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_values_gradients_layouts_and_what_is_kept_are_the_same(
    case: Case, dtype: torch.dtype, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needs_x, needs_weight, needs_bias in itertools.product((True, False), repeat=3):
        torch.manual_seed(1)
        layer: Any = case[1]()
        layer.weight.requires_grad_(needs_weight)
        if layer.bias is not None:
            layer.bias.requires_grad_(needs_bias)
        told = []
        for model in Pair(layer, monkeypatch, precision):
            x = randn(*case[2]).to(dtype).requires_grad_(needs_x)
            kept: list[tuple[Any, ...]] = []

            def keep(tensor: Tensor, kept: list[tuple[Any, ...]] = kept) -> Tensor:
                kept.append((tensor.dtype, tensor.shape, tensor.stride()))
                return tensor

            with saved_tensors_hooks(keep, lambda tensor: tensor):
                out = model(x)
            if out.requires_grad:
                out.backward(randn(*out.shape, seed=2).to(out.dtype))
            told.append((out, [x.grad, *(p.grad for p in model.parameters())], kept))
        (first, gradients, kept), (second, expected, wanted) = told
        assert torch.equal(first, second)
        assert (first.dtype, first.stride()) == (second.dtype, second.stride())
        assert kept == wanted
        for found, other in zip(gradients, expected, strict=True):
            assert (found is None) == (other is None)
            if found is not None and other is not None:
                assert torch.equal(found, other)
                assert (found.dtype, found.stride()) == (other.dtype, other.stride())


def test_they_run_where_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear in C++ and in Python, and each where the other cannot be."""
    nodes = [name_of_node(model(torch.ones(2, 4))) for model in Pair(nn.Linear(4, 4), monkeypatch)]
    assert "FloatLinear" in nodes[0]
    assert nodes[0].startswith("torch::autograd::CppNode")
    assert nodes[1] == "FloatLinearBackward"
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    setting: Any = torch.backends.mkldnn
    before = setting.matmul.fp32_precision
    for flag, compiled in (("ieee", True), ("bf16", False)):
        model = next(iter(Pair(nn.Linear(4, 4), monkeypatch, Precision.FP32)))
        setting.matmul.fp32_precision = flag
        try:
            node = name_of_node(model(x))
        finally:
            setting.matmul.fp32_precision = before
        assert node.startswith("torch::autograd::CppNode") is compiled
    half = nn.Sequential(nn.Linear(4, 4))
    convert(half, {"0": Precision.FP16}, emulate=True)
    monkeypatch.undo()
    assert name_of_node(half(torch.ones(2, 4))) == "FloatLinearBackward"  # emulated
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model, {"0": Precision.BF16})
    with pytest.raises(RuntimeError, match="functorch"):  # as every function in Python
        torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 4))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv2d(4, 4, 1)])
def test_gradients_of_gradients_are_refused(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in Pair(layer, monkeypatch):
        x = torch.ones(1, 4, 4, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).float().pow(2).sum(), x, create_graph=True)
        assert grad.requires_grad
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.backward(grad.sum())


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.FP32])
@pytest.mark.parametrize("layer", [nn.Linear(4, 1), nn.Conv2d(4, 1, 1), nn.Conv2d(4, 1, 2)])
def test_no_second_derivative_is_left_out_in_silence(
    layer: nn.Module, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind `sum()` the gradient that a layer is given depends on nothing, but its weight does."""
    for model in Pair(copy.deepcopy(layer), monkeypatch, precision):
        x = torch.ones(1, 4, 4, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x.tanh()).float().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            torch.autograd.backward(grad.pow(2).sum())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_whoever_looks_into_functions_sees_those_in_python() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    convert(model, {"0": Precision.BF16})
    make: Any = make_fx  # torch leaves it without annotations
    graph = make(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(randn(3, 5, 32))
    x = randn(4, 5, 32, seed=1)  # of another batch size
    assert torch.equal(graph(x), model(x))
    trace: Any = torch.jit.trace
    for found in (graph.graph, trace(model, x, check_trace=False).inlined_graph):
        assert "float_linear" not in str(found)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer, shape in ((nn.Linear(8, 8), (4, 8)), (nn.Conv2d(4, 6, 3), (2, 4, 8, 8))):
        found = []
        for model in Pair(layer, monkeypatch):
            x = randn(*shape).requires_grad_()
            out = model(x).float().pow(2).sum()
            backend: Any = compiled_autograd._enable
            with backend(torch.compile(backend="eager")):
                torch.autograd.backward(out)
            found.append([x.grad, *(p.grad for p in model.parameters())])
        for first, second in zip(*found, strict=True):
            assert first is not None
            assert second is not None
            assert torch.equal(first, second)


def test_fp32_sums_are_not_lowered_by_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    setting: Any = torch.backends.mkldnn
    before = setting.matmul.fp32_precision
    layer = nn.Linear(64, 64)
    gradients: list[Any] = []
    for flag in ("ieee", "bf16"):
        model = next(iter(Pair(copy.deepcopy(layer), monkeypatch)))
        setting.matmul.fp32_precision = flag
        try:
            torch.autograd.backward(model(randn(64, 64)).float().pow(2).sum())
        finally:
            setting.matmul.fp32_precision = before
        gradients.append(next(model.parameters()).grad)
    assert torch.equal(gradients[0], gradients[1])


def test_autocast_and_grad_modes_around_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(3, 8)
    for model in Pair(nn.Linear(8, 8), monkeypatch):
        expected = model(x)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(model(x), expected)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                out = model(x)
            assert torch.equal(out, expected)
            assert not out.requires_grad
        held = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(held).sum(), held)
        assert torch.isfinite(grad).all()


def test_weights_changed_before_backward_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in Pair(nn.Linear(4, 4), monkeypatch):
        out = model(torch.ones(2, 4, requires_grad=True))
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built yet, and what is found out stays here."""
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    before = host_library.compiled_layers
    monkeypatch.setattr(operators, "compiled_layers", before.__wrapped__)


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_python_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_host_compiler", lambda: None)
    with pytest.raises(KernelError, match=r"no C\+\+ compiler was found.*CXX"):
        build.build_layers()
    model = nn.Sequential(nn.Linear(4, 4))
    convert(model, {"0": Precision.BF16})
    with pytest.warns(RuntimeWarning, match="launch from Python.*compiler"):
        out = model(torch.ones(2, 4))
    assert name_of_node(out) == "FloatLinearBackward"


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_told_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "broken"
    asked = tmp_path / "asked"
    script.write_text(
        f"#!/bin/sh\necho $1 >> {asked}\nprintf 'layers.cpp:1: error: too old \\377' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} --option")
    for _ in range(2):
        with pytest.raises(KernelError, match=r"too old.*CXX names another; then remove .*failed"):
            build.build_layers()
    assert asked.read_text() == "--option\n"
    assert not list((tmp_path / "cache").glob("*/*.so"))
    next((tmp_path / "cache").glob("*/failed.txt")).unlink()
    with pytest.raises(KernelError, match="too old"):
        build.build_layers()
    assert asked.read_text() == "--option\n" * 2


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "end", ["kill -9 $$", "echo 'g++: fatal error: Killed signal terminated program' >&2; exit 1"]
)
def test_a_compiler_that_was_ended_is_asked_again(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, asked = tmp_path / "ended", tmp_path / "asked"
    script.write_text(f"#!/bin/sh\necho $1 >> {asked}\n{end}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} --option")
    for _ in range(2):
        with pytest.raises(KernelError, match="signal"):
            build.build_layers()
    assert asked.read_text() == "--option\n" * 2


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("named", ["no-such-compiler -O2", "g++ -DNAME='x", "/"])
def test_a_compiler_that_is_not_there_is_named(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    words = re.escape(f"CXX names {named!r}, which cannot be run")
    with pytest.raises(KernelError, match=words):
        build.build_layers()


@pytest.mark.usefixtures("fresh")
def test_a_library_that_cannot_be_loaded_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come from another machine, or be cut short."""
    built: list[str] = []

    def run(command: list[str], what: str, remedy: str) -> None:
        made = Path(command[command.index("-o") + 1])
        built.append(made.name)
        made.write_text(str(len(built)))

    def load(path: str) -> None:
        if Path(path).read_text() == "1":
            raise OSError("could not load this library")

    monkeypatch.setattr(build, "run_compiler", run)
    monkeypatch.setattr(torch.ops, "load_library", load)
    fresh: Any = host_library.compiled_layers
    assert fresh.__wrapped__() is not None
    assert len(built) == 2


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (build.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(KernelError, match=f"no cache folder.*{build.CACHE_VARIABLE}"):
        build.build_layers()


@pytest.mark.usefixtures("fresh")
def test_a_kept_library_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], what: str, remedy: str) -> None:
        commands.append(command)
        Path(command[command.index("-o") + 1]).touch()

    monkeypatch.setattr(build, "run_compiler", run)
    target = build.build_layers()
    monkeypatch.setattr(build, "find_host_compiler", lambda: None)
    assert build.build_layers() == target
    assert len(commands) == 1
    monkeypatch.setattr(torch, "__version__", "9.9.9")  # another torch, another library
    with pytest.raises(KernelError, match="no C"):
        build.build_layers()
