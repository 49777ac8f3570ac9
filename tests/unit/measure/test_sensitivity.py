"""Tables of perturbations: laws that hold for every indicator, and `variance` beside the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.sensitivity import METHODS, perturbations
from qsync_opt.precision import Precision

MODELS = Path(__file__).parents[3] / "models"
EVERY = tuple(Precision)
SQUARED = ("variance", "measured", "loss")  # these grow with the square of the loss

Built = tuple[nn.Module, Any, Callable[..., Tensor], OperatorGraph]


class Mixed(nn.Module):
    """Convolution, look-up, attention, dropout, a frozen and a shared layer, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.shared = nn.Linear(8, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(torch.tanh(self.shared(self.frozen(self.words(tokens)))))
        x = x + functional.scaled_dot_product_attention(x, x, x)
        y = functional.relu(self.norm(self.conv(x[:, None])), inplace=True).mean(1)
        return self.head(self.drop(x + y))  # type: ignore[no-any-return]


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def mixed() -> Built:
    torch.manual_seed(0)
    model = Mixed()
    tokens = torch.randint(0, 20, (2, 4, 6))
    batch = tokens[0], tokens[1]
    return model, batch, cross_entropy, capture(model, batch, cross_entropy, least_coverage=0.0)


def built(name: str, **sizes: object) -> Built:
    model, batch, loss = load_model(MODELS / f"{name}.py", sizes)
    graph = capture(model, batch, loss, least_coverage=0.0)
    return model, batch, loss, graph  # type: ignore[return-value]


def table_of(case: Built, method: str, **options: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    model, batch, loss, graph = case
    table = perturbations(model, batch, graph, method=method, loss=loss, **options)
    assert table.graph == graph.sha256
    assert table.method == method
    return table.values


@pytest.fixture(scope="module")
def case() -> Built:
    return mixed()


@pytest.fixture(scope="module")
def tables(case: Built) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    return {method: table_of(case, method, draws=2) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_only_what_can_be_lowered_is_perturbed(
    case: Built, tables: dict[str, np.ndarray[Any, np.dtype[np.float64]]], method: str
) -> None:
    graph, values = case[3], tables[method]
    assert values.shape == (len(graph.operators), len(EVERY))
    assert not np.isnan(values).any()
    assert (values >= 0).all()
    assert (values[:, EVERY.index(Precision.FP32)] == 0).all()
    for index, operator in enumerate(graph.operators):
        if operator.role is not Role.ADJUSTABLE:
            assert (values[index] == 0).all()


@pytest.mark.parametrize("method", [m for m in METHODS if m != "random"])
def test_what_an_operator_has_not_is_infinite(
    case: Built, tables: dict[str, np.ndarray[Any, np.dtype[np.float64]]], method: str
) -> None:
    graph = case[3]
    attention = graph.operator_index["scaled_dot_product_attention"]
    infinite = np.isinf(tables[method])
    assert [str(p) for p, found in zip(EVERY, infinite[attention], strict=True) if found] == [
        "fp8",
        "int8",
    ]
    infinite[attention] = False
    assert not infinite.any()


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_table(
    case: Built, tables: dict[str, np.ndarray[Any, np.dtype[np.float64]]], method: str
) -> None:
    np.testing.assert_array_equal(table_of(case, method, draws=2), tables[method])


@pytest.mark.parametrize("method", ["variance", "measured", "hessian", "random"])
def test_another_seed_draws_otherwise(
    case: Built, tables: dict[str, np.ndarray[Any, np.dtype[np.float64]]], method: str
) -> None:
    assert not np.array_equal(table_of(case, method, draws=2, seed=5), tables[method])


@pytest.mark.parametrize("method", SQUARED)
def test_a_larger_loss_counts_with_its_square(
    case: Built, tables: dict[str, np.ndarray[Any, np.dtype[np.float64]]], method: str
) -> None:
    model, batch, loss, _ = case

    def doubled(scores: Tensor, targets: Tensor) -> Tensor:
        return loss(scores, targets) * 4

    graph = capture(model, batch, doubled, least_coverage=0.0)
    values = table_of((model, batch, doubled, graph), method, draws=2)
    rows, old = list(graph.adjustable), list(case[3].adjustable)
    np.testing.assert_allclose(values[rows], 16 * tables[method][old], rtol=0.02)


def test_the_model_is_left_as_it_was(case: Built) -> None:
    model, batch, loss, graph = case
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    state = torch.get_rng_state()
    for method in METHODS:
        perturbations(model, batch, graph, method=method, loss=loss, draws=1)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))
    parameter.grad = None


@pytest.mark.parametrize("method", METHODS)
def test_several_batches_are_averaged(case: Built, method: str) -> None:
    model, batch, loss, graph = case
    other = batch[1], batch[0]
    options: dict[str, Any] = {"loss": loss, "draws": 1, "precisions": (Precision.BF16,)}
    both = perturbations(model, batch, graph, method=method, batches=[other], **options)
    first = perturbations(model, batch, graph, method=method, **options)
    second = perturbations(model, other, graph, method=method, **(options | {"seed": 1}))
    expected = (first.values + second.values) / 2
    if method == "random":
        expected = first.values
    np.testing.assert_allclose(both.values, expected, rtol=1e-12)
    assert both.provenance.batches == 2


def test_one_layer_that_runs_twice_shares_its_effect(
    case: Built, tables: dict[str, np.ndarray[Any, np.dtype[np.float64]]]
) -> None:
    graph = case[3]
    (group,) = [g for g in graph.groups if g.reason.value == "shared_module"]
    first, second = group.operators
    np.testing.assert_array_equal(tables["measured"][first], tables["measured"][second])
    assert not np.array_equal(tables["variance"][first], tables["variance"][second])


@pytest.mark.parametrize("method", [m for m in METHODS if m != "random"])
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_dead_inputs_and_outliers(method: str, scale: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    inputs = torch.randn(4, 6)
    inputs[1, 2] *= scale
    inputs = inputs if scale else torch.zeros_like(inputs)
    batch = inputs, torch.tensor([0, 1, 2, 0])
    graph = capture(model, batch, functional.cross_entropy, least_coverage=0.0)
    values = perturbations(model, batch, graph, method=method, loss=functional.cross_entropy).values
    assert np.isfinite(values).all()
    assert (values >= 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_are_zero(method: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    batch = torch.randn(4, 6), torch.zeros(())

    def nothing(output: Tensor, _: Tensor) -> Tensor:
        return output.sum() * 0

    graph = capture(model, batch, nothing, least_coverage=0.0)
    values = perturbations(model, batch, graph, method=method, loss=nothing).values
    assert np.isfinite(values).all()
    if method in SQUARED:
        assert (values == 0).all()


def test_what_overflows_in_fp16_is_infinite() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batch = torch.randn(3, 4) * 1e6, torch.zeros(3, 1)
    graph = capture(model, batch, functional.mse_loss, least_coverage=0.0)
    for method in ("variance", "measured"):
        table = perturbations(model, batch, graph, method=method, loss=functional.mse_loss)
        assert table.of("0", Precision.FP16) == np.inf
        assert table.of("0", Precision.BF16) < np.inf


def test_variance_is_that_of_stochastic_draws() -> None:
    # The gradient of the output is a constant of +-1: what the rounding of the input adds to
    # the weight gradient is all there is, and `measured` averages to it.
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 4, bias=False))
    batch = torch.randn(16, 32), torch.randn(16, 4).sign()

    def weighted(output: Tensor, signs: Tensor) -> Tensor:
        return (output * signs).sum()

    graph = capture(model, batch, weighted, least_coverage=0.0)
    predicted, found = (
        perturbations(
            model,
            batch,
            graph,
            method=method,
            loss=weighted,
            precisions=(Precision.FP8,),
            rounding=Rounding.STOCHASTIC,
            draws=128,
        ).of("0", Precision.FP8)
        for method in ("variance", "measured")
    )
    assert found == pytest.approx(predicted, rel=0.05)


CASES: dict[str, tuple[str, dict[str, object], int]] = {
    "cnn": ("small_cnn", {"batch_size": 64, "width": 8}, 6),
    "gpt": ("small_gpt", {"batch_size": 4, "length": 24, "layers": 1, "width": 32}, 1),
    "bert": (
        "bert",
        {
            "batch_size": 2,
            "length": 24,
            "layers": 1,
            "heads": 2,
            "width": 32,
            "vocabulary": 256,
        },
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_variance_ranks_and_sizes_as_measured(name: str) -> None:
    file, sizes, count = CASES[name]
    model, batch, loss, graph = built(file, **sizes)
    batches = [load_model(MODELS / f"{file}.py", {**sizes, "seed": n})[1] for n in range(1, count)]
    precisions = (Precision.BF16, Precision.FP8, Precision.INT8)
    predicted, truth = (
        perturbations(
            model,
            batch,
            graph,
            method=method,
            loss=loss,
            batches=batches,
            precisions=precisions,
        ).values[list(graph.adjustable)]
        for method in ("variance", "measured")
    )
    known = np.isfinite(truth)
    np.testing.assert_array_equal(known, np.isfinite(predicted))
    assert kendalltau(predicted[known], truth[known]).statistic >= 0.8
    ratios = np.log(predicted[known] / truth[known])
    assert abs(np.median(ratios)) < np.log(1.5)


class Products(nn.Module):
    """Products of activations, and parameters that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.query(x) @ x.transpose(1, 2) / 3, -1)
        y = torch.addmm(self.bias, (scores @ x).flatten(0, 1), self.weight)
        return torch.einsum("bk,kj->bj", y, self.weight)


class InPlace(nn.Module):
    """Rectifiers that overwrite what layers made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Linear(8 * 64, 32)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv(x), inplace=True), 2)
        x = self.first(x.flatten(1))
        x.relu_()
        return self.last(functional.dropout(x, 0.2))  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 4))


STRUCTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "products": (Products, (4, 8, 8), (32, 8)),
    "in_place": (InPlace, (256, 3, 16, 16), (256, 10)),
    "encoder": (encoder, (4, 8, 16), (4, 8, 4)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_variance_sees_every_kind_of_operator(name: str) -> None:
    make, inputs, targets = STRUCTURES[name]
    torch.manual_seed(4)
    model, batch = make(), (torch.randn(inputs), torch.randn(targets))
    graph = capture(model, batch, functional.mse_loss, least_coverage=0.0)
    case = model, batch, functional.mse_loss, graph
    precisions = (Precision.BF16, Precision.FP8, Precision.INT8)
    rows = list(graph.adjustable)
    predicted = table_of(case, "variance", precisions=precisions, draws=8)[rows]
    truth = table_of(case, "measured", precisions=precisions)[rows]
    known = np.isfinite(truth)
    np.testing.assert_array_equal(known, np.isfinite(predicted))
    ratios = np.log2(predicted[known] / truth[known])
    assert abs(np.median(ratios)) < 0.6
    assert np.abs(ratios).max() < 2.5


def test_bad_options_are_refused(case: Built) -> None:
    model, batch, loss, graph = case
    with pytest.raises(ParameterError, match="method"):
        perturbations(model, batch, graph, method="guess", loss=loss)
    with pytest.raises(ParameterError, match="precisions"):
        perturbations(model, batch, graph, precisions=(), loss=loss)
    with pytest.raises(ParameterError, match="precisions"):
        perturbations(model, batch, graph, precisions=(Precision.BF16,) * 2, loss=loss)
    with pytest.raises(ParameterError, match="draws"):
        perturbations(model, batch, graph, draws=0, loss=loss)


def test_a_graph_of_another_model_is_refused(case: Built) -> None:
    model, batch = nn.Sequential(nn.Linear(6, 2)), (torch.randn(3, 6), torch.zeros(3, 2))
    with pytest.raises(ParameterError, match="parameter 0.weight"):
        perturbations(model, batch, case[3], loss=functional.mse_loss)
    graph = capture(model, batch, functional.mse_loss, least_coverage=0.0)
    wider = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(ParameterError, match=r"must be \[2, 6\] as in the graph"):
        perturbations(wider, batch, graph, loss=functional.mse_loss)


def test_progress_is_told(case: Built) -> None:
    model, batch, loss, graph = case
    told: list[tuple[int, int]] = []
    perturbations(
        model,
        batch,
        graph,
        method="measured",
        loss=loss,
        batches=[batch],
        precisions=(Precision.BF16,),
        report=lambda done, total: told.append((done, total)),
    )
    assert told == [(n, told[-1][1]) for n in range(1, len(told) + 1)]
    assert told[-1][0] == told[-1][1]
