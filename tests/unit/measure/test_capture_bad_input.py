"""Mistakes around a capture: one clear line each, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt import cli
from qsync_opt.errors import CaptureError, ParameterError
from qsync_opt.files import load_graph
from qsync_opt.measure.attribution import coverage_of
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model, parse_sizes
from tests.unit.measure.nets import Chain, applied, chain_batch

Captured = pytest.CaptureFixture[str]


def refused(model: Any, batch: Any, loss: Any = None, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, batch, loss, **options)
    assert caught.value.remedy
    return str(caught.value)


def middle(function: Callable[[Any, Tensor], Any]) -> tuple[nn.Module, Any, Any]:
    return Chain(function), chain_batch(), functional.cross_entropy


class Extension(torch.autograd.Function):
    """What an extension does: its result comes from no torch function that read its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(x.detach().numpy().tobytes()), dtype=x.dtype).view(5, 8)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class OtherExtension(Extension):
    """Nor is its result a tensor that was seen at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.utils.dlpack.from_dlpack(x.detach().numpy().copy())


def test_a_batch_that_fails_in_forward() -> None:
    text = refused(
        Chain(), (torch.randn(5, 3), torch.zeros(5, dtype=torch.long)), functional.cross_entropy
    )
    assert "the forward of the model fails on the batch: RuntimeError: mat1 and mat2" in text


def test_a_backward_that_fails() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("no way back")

    assert "the backward of the model fails on the batch: ValueError: no way back" in refused(
        *middle(applied(Broken))
    )


def test_a_loss_that_needs_no_gradient() -> None:
    net = Chain()
    net.requires_grad_(False)
    assert "the loss needs no gradient" in refused(net, chain_batch(), functional.cross_entropy)


def test_a_loss_that_is_no_scalar() -> None:
    assert "the loss has shape [5, 3] and must be a scalar" in refused(Chain(), torch.randn(5, 4))


def test_a_loss_that_is_not_finite() -> None:
    text = refused(
        Chain(),
        (torch.full((5, 4), torch.inf), torch.zeros(5, dtype=torch.long)),
        functional.cross_entropy,
    )
    assert "the loss is nan" in text


def test_a_loss_of_another_kind() -> None:
    assert "the loss is a float" in refused(Chain(), chain_batch(), lambda output, target: 1.0)


def test_a_model_that_returns_no_loss() -> None:
    class Scores(Chain):
        def forward(self, x: Tensor) -> Any:
            return {"scores": super().forward(x)}

    assert "the model returned a dict without a loss" in refused(Scores(), torch.randn(5, 4))


@pytest.mark.parametrize("batch", [torch.randn(5, 4), (torch.randn(5, 4),), {"x": 1}])
def test_a_batch_that_is_no_pair(batch: Any) -> None:
    text = refused(Chain(), batch, functional.cross_entropy)
    assert "a loss function needs a batch (inputs, target)" in text or "no tensor" in text


def test_a_batch_without_tensors() -> None:
    assert "the batch holds no tensor" in refused(Chain(), {"x": [1, 2]})


def test_a_model_that_is_none() -> None:
    assert "the model is a str" in refused("resnet50", torch.randn(1))
    assert "the model has no parameters" in refused(nn.ReLU(), torch.randn(1))


def test_devices_that_differ_or_cannot_run() -> None:
    assert "model and batch are on cpu, meta" in refused(Chain().to("meta"), chain_batch())
    text = refused(Chain().to("meta"), torch.empty(5, 4, device="meta"))
    assert "the model is on meta" in text


def test_parameters_that_are_not_fp32() -> None:
    text = refused(Chain().bfloat16(), chain_batch(), functional.cross_entropy)
    assert "parameter first.weight is trained in torch.bfloat16" in text
    assert "model.float()" in text


def test_a_step_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = refused(Chain(), chain_batch(), functional.cross_entropy)
    assert "linear in first hands on torch.bfloat16" in text


def test_a_trained_tensor_that_is_no_parameter() -> None:
    extra = torch.ones(8, requires_grad=True)
    text = refused(*middle(lambda net, h: h * extra))
    assert "a tensor of shape [8] is trained and is no parameter of the model" in text


def test_a_tensor_that_was_not_seen() -> None:
    text = refused(*middle(applied(OtherExtension)))
    assert "that OtherExtensionBackward made was not seen" in text
    assert "torch.library" in text


def test_a_link_that_was_not_seen() -> None:
    text = refused(*middle(applied(Extension)))
    assert "linear in first gets a gradient, but nothing seen hands its output on" in text


def test_a_compiled_or_wrapped_model() -> None:
    compiled = torch.compile(Chain(), backend="eager")
    assert "is compiled, which hides its operators" in refused(compiled, chain_batch())


def test_what_is_left_unexplained_is_named() -> None:
    """Time outside of every torch function, which no case of the CPU gives reliably."""
    from qsync_opt.measure.attribution import SequenceOwners
    from qsync_opt.measure.recorder import Recorder
    from qsync_opt.measure.records import BackwardWork, Work

    recorder = Recorder(Chain(), {}, torch.device("cpu"))
    recorder.outside = Work(marks=[(0.0, 3.0)])
    recorder.backward = {
        ("A", 1, False): BackwardWork(
            name="A", sequence=1, adds=False, work=Work(marks=[(3.0, 4.0)])
        ),
        ("A", 1, True): BackwardWork(
            name="A", sequence=1, adds=True, work=Work(marks=[(4.0, 10.0)])
        ),
    }
    coverage = coverage_of(recorder, SequenceOwners(recorder))
    assert (coverage.forward_s, coverage.backward_s, coverage.explained_s) == (3.0, 7.0, 6.0)
    assert coverage.share == pytest.approx(0.6)
    assert list(coverage.missing.values()) == [3.0, 1.0]


def test_a_graph_that_explains_too_little_is_refused() -> None:
    # A share of time cannot exceed one, so this asks for more than there is.
    text = refused(*middle(lambda net, h: h.relu()), least_coverage=1.01)
    assert "the graph explains 100.0% of the step's time and must explain 101%" in text


# Model files.


GOOD = """
import torch
from torch import nn

print("loading")

def build(batch_size=2, scale=1.0, name="x"):
    return nn.Linear(4, 3), (torch.randn(batch_size, 4), torch.zeros(batch_size).long()), (
        nn.CrossEntropyLoss())
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "model.py has no build()"),
        ("build = 3", "model.py has no build()"),
        ("def build(:", "model.py fails: SyntaxError"),
        ("import nothing_of_this_name", "model.py fails: ModuleNotFoundError"),
        ("def build(): return 1", "returned a int. Return three things"),
        ("def build(): return 1, 2, 3", "the model that build() of"),
        ("def build(): 1 / 0", "fails: ZeroDivisionError"),
        (
            "from torch import nn\ndef build(): return nn.Linear(1, 1), None, 3",
            "the loss that build",
        ),
    ],
)
def test_a_model_file_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as caught:
        load_model(written(tmp_path, text))
    assert message in str(caught.value)


def test_a_model_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="is no file"):
        load_model(tmp_path / "none.py")


def test_an_argument_that_build_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="batch_size, scale, name"):
        load_model(written(tmp_path, GOOD), {"width": 3})


def test_settings_are_literals_or_text() -> None:
    assert parse_sizes(["a=3", "b=1e-3", "c=True", "d=[1, 2]", "e=125M", "f="]) == {
        **{"a": 3, "b": 1e-3, "c": True, "d": [1, 2], "e": "125M", "f": ""}
    }


@pytest.mark.parametrize("settings", [["a"], ["=3"], ["a b=3"], ["a=1", "a=2"]])
def test_settings_that_are_none(settings: list[str]) -> None:
    with pytest.raises(ParameterError, match="^set: must"):
        parse_sizes(settings)


# The command.


def test_the_command_writes_a_graph(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "graph.json.gz"
    arguments = ["capture", str(written(tmp_path, GOOD)), "-o", str(out), "--set", "batch_size=3"]
    assert cli.main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)  # what the file prints does not get in between
    graph = load_graph(out)
    assert shown["sha256"] == graph.sha256
    assert shown["operators"] == len(graph.operators) == 2
    assert graph.provenance.sizes == {"batch_size": "3"}
    assert graph.provenance.batch == {"0": "float32[3, 4]", "1": "int64[3]"}
    assert cli.main(arguments) == 0
    assert "2 operators (1 adjustable, 1 fixed), 2 different" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--set", "width=3"], "must be an argument of build()"),
        (["--set", "width"], "--set: must be key=value"),
        (["--set", "batch_size=0.5"], "build() of"),
    ],
)
def test_the_command_refuses_in_one_line(
    settings: list[str], message: str, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "graph.json"
    code = cli.main(["capture", str(written(tmp_path, GOOD)), "-o", str(out), *settings])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("qsync-opt: ")
    assert message in line
    assert not out.exists()


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "none" / "graph.json"
    assert cli.main(["capture", str(written(tmp_path, GOOD)), "-o", str(out)]) == 2
    assert "must be in a folder that can be written" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_command_refuses_a_device_that_is_not_there(tmp_path: Path, capsys: Captured) -> None:
    arguments = ["capture", str(written(tmp_path, GOOD)), "-o", str(tmp_path / "g.json")]
    assert cli.main([*arguments, "--device", "cuda"]) == 2
    assert "--device: must be usable here, got 'cuda'" in capsys.readouterr().err
