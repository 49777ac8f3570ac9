"""Scaled products on CUDA: what can run a shape, and the registry's choice among it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.kernels import launch, reference
from qsync_opt.kernels.native import Native, capability_of
from qsync_opt.kernels.registry import Key, Run, registry_of, round_size

BF16 = torch.bfloat16

HOPPER = (9, 0)

#: Least compute capability with fp8 products.
FP8_CAPABILITY = (8, 9)

#: Columns and cluster of the Hopper product's tiles, the usual winner first.
TILES = {
    "sm90 128x256 cluster 2": (256, 2),
    "sm90 128x128 cluster 2": (128, 2),
    "sm90 128x256": (256, 1),
    "sm90 128x128": (128, 1),
}

#: Columns of the Hopper convolution's tiles.
PIXEL_TILES = {"sm90 pixels 128x256": 256, "sm90 pixels 128x128": 128}

#: Rows and columns of a result that are held against the oracle before a kernel is trusted.
_SAMPLE = 32

#: Groups of a convolution up to which a product a group is worth its launches.
_MOST_GROUPS = 8


def _same(expected: Tensor, result: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(expected), torch.nan_to_num(result)) and torch.equal(
        expected.isnan(), result.isnan()
    )


def _sample(count: int, device: torch.device) -> Tensor:
    """Places spread over 0 .. count - 1, both ends included."""
    step = torch.linspace(0, count - 1, min(count, _SAMPLE), device=device, dtype=torch.float64)
    return step.round().to(torch.int64)


def _rows_of(scale: Tensor, rows: Tensor) -> Tensor:
    return scale[rows] if scale.numel() > 1 else scale


def int8_matmul(
    native: Native | None,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `reference.int8_matmul`, by the fastest implementation for the shape."""
    arguments = (a, b, a_scale, b_scale, bias, out_dtype)
    (rows, depth), columns = a.shape, b.shape[0]
    if 0 in (rows, columns, depth) or depth > reference.INT8_DEPTH:
        return reference.int8_matmul(*arguments)

    def run(name: str) -> Tensor:
        if name == "_int_mm" or native is None:
            return launch.int_mm_product(*arguments)
        return launch.int8_product(native, *arguments, tile=TILES.get(name))

    def correct(result: Tensor) -> bool:
        i, j = _sample(rows, a.device), _sample(columns, a.device)
        part = bias if bias is None else bias[j]
        scales = _rows_of(a_scale, i), _rows_of(b_scale, j)
        return _same(reference.int8_matmul(a[i], b[j], *scales, part, out_dtype), result[i][:, j])

    def names() -> list[str]:
        compiled = [] if native is None else [*(TILES if _is_hopper(a.device) else ()), "mma"]
        return [*compiled, "_int_mm"]

    key = ("int8_matmul", round_size(rows), columns, depth, out_dtype, bias is not None)
    return _run(a.device, key, names, run, correct)


def int8_conv2d(
    native: Native | None,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `reference.int8_conv2d`, by the fastest implementation for the shape."""
    rest = (x_scale, weight_scale, bias, stride, padding, dilation, groups, out_dtype)
    is_long = weight[:1].numel() > reference.INT8_DEPTH
    if 0 in (*x.shape, *weight.shape) or groups > _MOST_GROUPS or is_long:
        return reference.int8_conv2d(x, weight, *rest)

    def run(name: str) -> Tensor:
        if name not in PIXEL_TILES or native is None:
            return _unfolded(native, x, weight, *rest)
        window = (*weight.shape[2:], *stride, *padding, *dilation)
        size = out_size(x, weight, stride, padding, dilation)
        operands = (x, weight, x_scale, weight_scale, bias)
        return launch.int8_convolution(
            native, *operands, window, size, out_dtype, PIXEL_TILES[name]
        )

    def correct(result: Tensor) -> bool:
        last = weight[-_SAMPLE:] if groups == 1 else weight
        part = bias if bias is None else bias[-len(last) :]
        scales = x_scale, weight_scale[-len(last) :]
        expected = reference.int8_conv2d(
            x[:1], last, *scales, part, stride, padding, dilation, groups, out_dtype
        )
        return _same(expected, result[:1, -len(last) :])

    def names() -> list[str]:
        pixels = native is not None and groups == 1 and _fits(weight, stride, padding, dilation)
        return [*(PIXEL_TILES if pixels else ()), "unfold"]

    shape = (round_size(x.shape[0]), *x.shape[1:], *weight.shape)
    options = (*stride, *padding, *dilation, out_dtype, bias is not None)
    return _run(x.device, ("int8_conv2d", *shape, *options), names, run, correct)


def fp8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `reference.fp8_matmul`, by `torch._scaled_mm` on padded operands where the device has it.

    Scales a row apply in a pass of their own where the library does not take them. A bias is
    rounded to a 16-bit output first.
    """
    (rows, depth), columns = a.shape, b.shape[0]
    usable = capability_of(a.device.index) >= FP8_CAPABILITY
    usable &= torch.float8_e4m3fn in (a.dtype, b.dtype)  # e5m2 by e5m2 does not exist
    if not usable or 0 in (rows, columns, depth):
        return reference.fp8_matmul(a, b, a_scale, b_scale, bias, out_dtype)
    a, b = _pad16(a), _pad16(b, rows_too=True)
    if a_scale.numel() == 1 and b_scale.numel() == 1:
        scales = a_scale.reshape(()), b_scale.reshape(())
        inside = None
        if bias is not None and out_dtype is not torch.float32:
            inside = _padded(bias.to(out_dtype), b.shape[0])
        out = torch._scaled_mm(a, b.t(), *scales, bias=inside, out_dtype=out_dtype)
        out = out if out.shape[1] == columns else out[:, :columns].contiguous()
        return out if bias is None or inside is not None else out + bias.to(torch.float32)
    if out_dtype is BF16 and a.dtype is b.dtype:  # e4m3 twice: the library takes a scale a row
        rows_scale = a_scale.expand(rows, 1).contiguous()
        columns_scale = _padded(b_scale.expand(columns, 1).reshape(columns), b.shape[0])
        inside = None if bias is None else _padded(bias.to(BF16), b.shape[0])
        out = torch._scaled_mm(
            a, b.t(), rows_scale, columns_scale.view(1, -1), bias=inside, out_dtype=out_dtype
        )
        return out if out.shape[1] == columns else out[:, :columns].contiguous()
    one = torch.ones((), dtype=torch.float32, device=a.device)
    product = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)[:, :columns]
    out = product * a_scale * b_scale.t()
    return (out if bias is None else out + bias.to(torch.float32)).to(out_dtype)


def out_size(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Height and width of a convolution's output."""
    height, width = (
        (x.shape[i + 2] + 2 * padding[i] - dilation[i] * (weight.shape[i + 2] - 1) - 1) // stride[i]
        + 1
        for i in range(2)
    )
    return height, width


def _run(
    device: torch.device,
    key: Key,
    names: Callable[[], list[str]],
    run: Callable[[str], Tensor],
    correct: Callable[[Tensor], bool],
) -> Tensor:
    registry = registry_of(device.index)
    name = registry.known(key)
    if name is None:
        with torch.cuda.device(device):
            may_measure = not torch.cuda.is_current_stream_capturing()
        candidates: dict[str, Run] = {name: functools.partial(run, name) for name in names()}
        name = registry.choose(key, candidates, correct, may_measure=may_measure)
    return run(name)


def _is_hopper(device: torch.device) -> bool:
    return capability_of(device.index) == HOPPER


def _fits(
    weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> bool:
    """Whether Hopper's im2col maps hold the window; limits as in cuda/tensor_map.cuh."""
    if not _is_hopper(weight.device):
        return False
    last = [dilation[i] * (weight.shape[i + 2] - 1) for i in range(2)]
    return all(
        padding[i] <= 128 and last[i] - padding[i] <= 128 and last[i] <= 255 and stride[i] <= 8
        for i in range(2)
    )


def _unfolded(
    native: Native | None,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """A convolution as one product a group; 1 x 1 windows read channels-last input as it is."""
    height, width = out_size(x, weight, stride, padding, dilation)
    filters, channels, filter_h, filter_w = weight.shape
    pixels = x.permute(0, 2, 3, 1)
    pixels = functional.pad(
        pixels, (0, 0, padding[1], padding[1], padding[0], padding[0])
    ).contiguous()
    n, h, w, c = pixels.stride()
    patches = pixels.as_strided(
        (x.shape[0], height, width, filter_h, filter_w, x.shape[1]),
        (n, h * stride[0], w * stride[1], h * dilation[0], w * dilation[1], c),
    )
    rows = x.shape[0] * height * width
    depth = filter_h * filter_w * channels
    flat = weight.permute(0, 2, 3, 1).reshape(filters, depth)
    results = []
    for group in range(groups):
        part = patches[..., group * channels : (group + 1) * channels].reshape(rows, depth)
        own = slice(group * (filters // groups), (group + 1) * (filters // groups))
        scale, shift = weight_scale.view(-1, 1)[own], None if bias is None else bias[own]
        results.append(int8_matmul(native, part, flat[own], x_scale, scale, shift, out_dtype))
    out = results[0] if groups == 1 else torch.cat(results, dim=1)
    return out.view(x.shape[0], height, width, filters).permute(0, 3, 1, 2)


def _padded(values: Tensor, count: int) -> Tensor:
    """With zeros at the end up to `count`; padding by nothing would copy."""
    missing = count - values.shape[0]
    return functional.pad(values, (0, missing)) if missing else values


def _pad16(matrix: Tensor, *, rows_too: bool = False) -> Tensor:
    """With both sizes multiples of 16 where asked for; zeros add nothing to a product."""
    below = -matrix.shape[0] % 16 if rows_too else 0
    right = -matrix.shape[1] % 16
    if not (below or right):
        return matrix.contiguous()
    return functional.pad(matrix.view(torch.uint8), (0, right, 0, below)).view(matrix.dtype)
