"""Calls as text: names that find their function again, arguments that come back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from qsync_opt.measure.calls import (
    decode_arguments,
    encode_arguments,
    find_function,
    function_kind,
    function_name,
    opened,
    replace_tensors,
    tensors_in,
)
from qsync_opt.precision import Precision

X = torch.arange(6.0).reshape(2, 3)
Y = torch.ones(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "name", "kind"),
    [
        (functional.linear, "torch.nn.functional.linear", "linear"),
        (torch.Tensor.add, "torch.Tensor.add", "add"),
        (torch.Tensor.__getitem__, "torch.Tensor.__getitem__", "getitem"),
        (torch.Tensor.__rsub__, "torch.Tensor.__rsub__", "rsub"),
        (torch.Tensor.add_, "torch.Tensor.add_", "add_"),
        (vars(torch._C.TensorBase)["T"].__get__, "torch.Tensor.T.__get__", "T"),
        (torch.ops.aten.relu, "torch.ops.aten.relu", "relu"),
        (torch._C._nn.cross_entropy_loss, "torch._C._nn.cross_entropy_loss", "cross_entropy_loss"),
    ],
)
def test_a_name_finds_its_function(function: Any, name: str, kind: str) -> None:
    assert function_name(function) == name
    assert function_kind(name) == kind
    found = find_function(name)
    assert found == function


def test_a_name_without_a_function() -> None:
    with pytest.raises(AttributeError):
        find_function("torch.nn.functional.no_such_function")
    with pytest.raises(AttributeError):
        find_function("nosuchmodule.f")


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, 1, 2.5, True, None, "mean"), {}),
    (([X, (Y, X)], {"key": X}), {"dim": -1}),
    ((X, (slice(1, None, 2), None, Ellipsis, Y)), {}),
    ((torch.float16, torch.channels_last, torch.strided), {"dtype": torch.int64}),
    ((math.inf, -math.inf), {"precision": Precision.BF16}),
    ((torch.Size([2, 3]), ()), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS)
def test_arguments_come_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    text = encode_arguments(args, kwargs)
    again = decode_arguments(text, tensors_in((args, kwargs)), torch.device("cpu"))
    assert encode_arguments(*again) == text
    pairs = zip(tensors_in((args, kwargs)), tensors_in(again), strict=True)
    assert all(one is other for one, other in pairs)
    without = [replace_tensors(value, lambda tensor: None) for value in ((args, kwargs), again)]
    assert without[0] == without[1]


def test_a_device_becomes_that_of_the_run() -> None:
    text = encode_arguments((torch.device("cpu"),), {})
    assert decode_arguments(text, [], torch.device("meta"))[0] == (torch.device("meta"),)


def test_what_is_no_text_cannot_come_back() -> None:
    text = encode_arguments((object(),), {})
    with pytest.raises(ValueError, match="builtins.object as argument cannot be run again"):
        decode_arguments(text, [], torch.device("cpu"))


def test_an_opened_function_does_the_same() -> None:
    function = opened(functional.layer_norm)
    assert function is not None
    assert torch.equal(function(X, (3,)), functional.layer_norm(X, (3,)))
    assert opened(functional.linear) is None
