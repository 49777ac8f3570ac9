"""The model files: parameters as published, seeded batches, and small models that learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.step import call_model, leaves, loss_of, split_batch

MODELS = Path(__file__).parents[2] / "models"

#: Sizes with which a model is built in no time.
SIZES: dict[str, dict[str, Any]] = {
    "resnet50": {"batch_size": 2, "image_size": 32},
    "vgg16": {"batch_size": 1, "image_size": 32, "hidden": 8},
    "vgg16_bn": {"batch_size": 1, "image_size": 32, "hidden": 8},
    "bert": {"batch_size": 2, "length": 16, "layers": 1, "heads": 2, "width": 32, "vocabulary": 64},
    "roberta": {
        "batch_size": 2,
        "length": 16,
        "layers": 1,
        "heads": 2,
        "width": 32,
        "vocabulary": 64,
    },
    "gpt": {"batch_size": 1, "length": 16, "layers": 1, "vocabulary": 128},
    "small_cnn": {"batch_size": 4},
    "small_gpt": {"batch_size": 4},
}

#: Parameters in millions, as torchvision documents its models (resnet50, vgg16, vgg16_bn).
TORCHVISION_PARAMETERS = {"resnet50": 25557032, "vgg16": 138357544, "vgg16_bn": 138365992}


def build(name: str, **sizes: Any) -> tuple[nn.Module, Any, Any]:
    return load_model(MODELS / f"{name}.py", {**SIZES[name], **sizes})


@pytest.mark.parametrize("name", SIZES)
def test_equal_seeds_give_equal_models_and_batches(name: str) -> None:
    one, other, third = build(name), build(name), build(name, seed=1)
    state, again = one[0].state_dict(), other[0].state_dict()
    assert all(torch.equal(state[key], again[key]) for key in state)
    batch = dict(leaves(one[1]))
    assert all(torch.equal(tensor, batch[key]) for key, tensor in leaves(other[1]))
    assert any(not torch.equal(tensor, batch[key]) for key, tensor in leaves(third[1]))
    assert one[0].training


def _torchvision_names(name: str) -> set[str]:
    """The names in torchvision's checkpoints, from the layout that its models document."""
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = set()
    if name == "resnet50":
        blocks = [("conv1", "bn1", "")]
        for stage, depth in enumerate((3, 4, 6, 3), start=1):
            for block in range(depth):
                place = f"layer{stage}.{block}."
                blocks += [(f"{place}conv{i}", f"{place}bn{i}", "") for i in (1, 2, 3)]
                if block == 0:
                    blocks.append((f"{place}downsample.0", f"{place}downsample.1", ""))
        for conv, bn, _ in blocks:
            names |= {f"{conv}.weight", *(f"{bn}.{part}" for part in norm)}
        return names | {"fc.weight", "fc.bias"}
    position = 0
    for convolutions in (2, 2, 3, 3, 3):
        for _ in range(convolutions):
            names |= {f"features.{position}.weight", f"features.{position}.bias"}
            if name == "vgg16_bn":
                names |= {f"features.{position + 1}.{part}" for part in norm}
                position += 1
            position += 2  # and the ReLU
        position += 1  # the pooling
    return names | {f"classifier.{i}.{part}" for i in (0, 3, 6) for part in ("weight", "bias")}


@pytest.mark.parametrize("name", TORCHVISION_PARAMETERS)
def test_names_and_sizes_are_those_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        model = load_model(MODELS / f"{name}.py", {"batch_size": 1})[0]
    assert set(model.state_dict()) == _torchvision_names(name)
    assert sum(p.numel() for p in model.parameters()) == TORCHVISION_PARAMETERS[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TORCHVISION_PARAMETERS)
def test_a_checkpoint_of_torchvision_loads(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    theirs = getattr(torchvision.models, name)().eval()
    ours = load_model(MODELS / f"{name}.py", {"batch_size": 1, "channels_last": False})[0].eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(("size", "named"), [("125M", 125e6), ("350M", 350e6), ("1.3B", 1.3e9)])
def test_gpt_has_the_parameters_of_its_name(size: str, named: float) -> None:
    with torch.device("meta"):
        model = load_model(MODELS / "gpt.py", {"batch_size": 1, "size": size})[0]
    count = sum(p.numel() for p in model.parameters())
    width = model.get_parameter("ln.weight").numel()
    layers = len(list(model.get_submodule("blocks").children()))
    # 12 d^2 + 13 d a layer, embeddings of 50,304 tokens and 1,024 positions, the last norm.
    assert count == layers * (12 * width**2 + 13 * width) + (50304 + 1024) * width + 2 * width
    assert count == pytest.approx(named, rel=0.02)


@pytest.mark.parametrize("name", SIZES)
def test_the_layers_of_a_model_are_its_adjustable_operators(name: str) -> None:
    model, batch, loss = build(name)
    graph = capture(model, batch, loss, least_coverage=0.0)
    layers = {
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding))
    }
    found = {graph.operators[index].name for index in graph.adjustable}
    assert {name for name in found if not name.endswith("scaled_dot_product_attention")} == layers
    assert {graph.parameters[index].name for index in graph.gradient_order} == {
        path for path, parameter in model.named_parameters() if parameter.grad_fn is None
    }


def test_gpt_refuses_an_unknown_size() -> None:
    with pytest.raises(Exception, match="size must be one of 125M, 350M, 760M, 1.3B, got '2B'"):
        build("gpt", size="2B")


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("task", ["question_answering", "multiple_choice"])
def test_both_tasks_give_their_loss(name: str, task: str) -> None:
    model, batch, loss = build(name, task=task)
    assert loss is None
    value = loss_of(call_model(model, batch), None, None)
    assert torch.isfinite(value)
    with pytest.raises(Exception, match="task must be one of"):
        build(name, task="translation")


@pytest.mark.parametrize(("name", "rate"), [("small_cnn", 1e-2), ("small_gpt", 3e-3)])
def test_small_models_learn_their_batch(name: str, rate: float) -> None:
    model, batch, loss = load_model(MODELS / f"{name}.py")
    inputs, target = split_batch(batch, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        value = loss_of(call_model(model, inputs), target, loss)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < 0.75 * losses[0]


def test_digits_and_text_are_real_data() -> None:
    images, labels = build("small_cnn", batch_size=64)[1]
    assert images.shape == (64, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    assert set(labels.tolist()) == set(range(10))
    tokens, targets = build("small_gpt", batch_size=4)[1]
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    text = bytes(tokens.flatten().tolist()).decode("utf-8", errors="replace")
    assert text.isprintable() or "\n" in text
