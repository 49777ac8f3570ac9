"""Int8 convolutions equal the reference bit for bit, whichever implementation runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qsync_opt.kernels import launch, library, products, reference
from qsync_opt.kernels.native import Native

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

Pair = tuple[int, int]
Case = tuple[int, int, int, int, int, Pair, Pair, Pair, Pair, int]

#: Images, channels, height, width, filters, filter, stride, padding, dilation, groups.
CASES: tuple[Case, ...] = (
    (2, 128, 14, 14, 128, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    (3, 256, 7, 9, 512, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (2, 128, 15, 13, 256, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    (2, 144, 9, 8, 40, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    (2, 64, 12, 12, 96, (3, 3), (1, 2), (2, 1), (2, 1), 1),
    (1, 3, 32, 32, 64, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    (2, 16, 10, 11, 24, (5, 2), (3, 1), (4, 0), (2, 3), 1),
    (2, 32, 9, 9, 64, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    (2, 48, 9, 9, 48, (3, 3), (1, 1), (1, 1), (1, 1), 48),
    (1, 5, 1, 1, 7, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    (130, 16, 1, 1, 8, (1, 1), (1, 1), (1, 1), (1, 1), 1),
)


def operands(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    images, channels, height, width, filters, window, _, _, _, groups = case
    generator = torch.Generator(device).manual_seed(channels * 7 + filters)
    x, weight = (
        torch.randint(-127, 128, size, dtype=torch.int8, device=device, generator=generator).to(
            memory_format=torch.channels_last
        )
        for size in (
            (images, channels, height, width),
            (filters, channels // groups, *window),
        )
    )
    x_scale = torch.rand((), device=device, generator=generator) / 1e2
    weight_scale = torch.rand(filters, device=device, generator=generator) / 1e2
    return x, weight, x_scale, weight_scale, torch.randn(filters, device=device)


@pytest.mark.parametrize("case", CASES)
def test_the_operator_equals_the_reference(case: Case, device: torch.device) -> None:
    x, weight, x_scale, weight_scale, bias = operands(case, device)
    for values, dtype in (
        (None, torch.bfloat16),
        (bias, torch.float32),
        (bias.half(), torch.float16),
    ):
        arguments = (x, weight, x_scale, weight_scale, values, *case[6:], dtype)
        found, expected = library.int8_conv2d(*arguments), reference.int8_conv2d(*arguments)
        assert found.dtype is dtype
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("case", [case for case in CASES if case[-1] == 1])
def test_the_pixel_kernel_equals_the_reference(
    case: Case, columns: int, kernels: Native, device: torch.device
) -> None:
    if torch.cuda.get_device_capability(device) != products.HOPPER:
        pytest.skip("a Hopper kernel")
    x, weight, x_scale, weight_scale, bias = operands(case, device)
    stride, padding, dilation = case[6:9]
    size = products.out_size(x, weight, stride, padding, dilation)
    window = (*weight.shape[2:], *stride, *padding, *dilation)
    scaled = (x, weight, x_scale, weight_scale, bias)
    found = launch.int8_convolution(kernels, *scaled, window, size, torch.float32, columns)
    expected = reference.int8_conv2d(*scaled, stride, padding, dilation, 1, torch.float32)
    assert torch.equal(found, expected)


def test_input_that_is_not_channels_last(device: torch.device) -> None:
    x, weight, *rest = operands(CASES[0], device)
    scaled = (rest[0], rest[1], rest[2], *CASES[0][6:], torch.bfloat16)
    expected = reference.int8_conv2d(x, weight, *scaled)
    assert torch.equal(library.int8_conv2d(x.contiguous(), weight.contiguous(), *scaled), expected)


def test_no_images(device: torch.device) -> None:
    arguments = operands((0, *CASES[0][1:]), device)
    out = library.int8_conv2d(*arguments, *CASES[0][6:], torch.bfloat16)
    assert out.shape == (0, 128, 14, 14)
