"""Whether a device multiplies matrices right, before its times are kept or it trains.

It cannot be taken for granted. Under NVIDIA's MPS, on parts of an H200 with 26, 38, 42, 52,
58 and 72 to 112 multiprocessors (20, 30 to 45 and 55 to 85 %), the products in bf16, fp16 and
fp8 of cuBLAS 13.0 leave out whole tiles, without an error; on parts with 12, 14, 32, 66, 118
and 124, and on a whole GPU, they are right, and so are tf32 and int8 everywhere (measured;
the tile kernels for clusters of multiprocessors are the wrong ones). Losses then are NaN, or,
worse, merely too high.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_opt.errors import KernelError
from qsync_opt.kernels import library
from qsync_opt.precision import Precision
from qsync_opt.runtime import arithmetic
from qsync_opt.runtime.availability import available_precisions
from qsync_opt.runtime.casts import half_dtype

#: Formats of operands. Those of int8 are not here: its kernels are compared with the reference
#: for every shape before one is taken, see `kernels.registry`.
_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP8: torch.float8_e4m3fn,
}

#: Where it is worth the time: a CPU, and what is emulated there, is the reference elsewhere.
_DEVICE_TYPES = ("cuda",)

#: One term in so many adds up, the others cancel: a product that leaves out as many is seen.
_SPACING = 64

_WITHOUT_HALF = frozenset({Precision.FP32, Precision.TF32})

_MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product to check, [rows, depth] by [depth, columns].

    Attributes:
        rows, depth, columns: sizes; the depth is a multiple of 64.
        layout: `forward` (x @ weight.T), `grad_input` (grad @ weight) or `grad_weight`
            (grad.T @ x): which operand lies transposed in memory.
    """

    rows: int
    depth: int
    columns: int
    layout: str

    def __str__(self) -> str:
        return f"[{self.rows}, {self.depth}] x [{self.depth}, {self.columns}] of a {self.layout}"


def _of_layer(rows: int, inputs: int, outputs: int) -> tuple[Product, ...]:
    return (
        Product(rows=rows, depth=inputs, columns=outputs, layout="forward"),
        Product(rows=rows, depth=outputs, columns=inputs, layout="grad_input"),
        Product(rows=outputs, depth=rows, columns=inputs, layout="grad_weight"),
    )


#: Those of a transformer's layers: few and many tiles, for which libraries take other kernels.
PRODUCTS = tuple(
    product
    for rows in (1536, 3072)
    for inputs, outputs in ((768, 768), (768, 3072), (3072, 768))
    for product in _of_layer(rows, inputs, outputs)
)


def require_right_products(
    device: torch.device,
    precisions: Iterable[Precision],
) -> None:
    """On a GPU, multiply matrices whose product is known, and compare every element.

    Args:
        device: that is to compute.
        precisions: of operators; what of them the device emulates is not looked at.

    Raises:
        KernelError: some are wrong.
    """
    if device.type not in _DEVICE_TYPES:
        return
    needed = set(precisions)
    if not needed <= _WITHOUT_HALF:  # 8-bit operators have products in 16 bits too
        needed.add(Precision.BF16 if half_dtype(device) is torch.bfloat16 else Precision.FP16)
    needed &= available_precisions(device)
    for precision in _DTYPES:
        wrong = _found_wrong(device, precision) if precision in needed else ()
        if wrong:
            raise _refusal(device, precision, wrong, len(PRODUCTS))


@functools.cache
def _found_wrong(device: torch.device, precision: Precision) -> tuple[Product, ...]:
    """Of `PRODUCTS`, once a process: its part of a GPU stays the same."""
    return tuple(wrong_products(device, precision, PRODUCTS))


def wrong_products(
    device: torch.device, precision: Precision, products: Iterable[Product]
) -> list[Product]:
    """Those that a device computes wrong in a precision.

    Args:
        device: of any type.
        precision: of the operands; not int8.
        products: to try.
    """
    return [product for product in products if not _is_right(device, precision, product)]


def _is_right(device: torch.device, precision: Precision, product: Product) -> bool:
    """Operands are outer products of powers of two and signs, which are exact in all precisions.

    So is the result: a power of two times the number of terms that do not cancel, and so are
    the sums of any whole parts of the depth, in whatever order they are added up.
    """
    depth = torch.arange(product.depth, device=device)
    signs = 1 - 2 * ((depth * 37 // 11) % 2)
    terms = torch.where((depth % 2 == 0) | (depth % _SPACING == _SPACING - 1), 1, -1)
    dtype = _DTYPES[precision]
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype  # there is no outer product in fp8
    row_scale = _powers(product.rows, 5, device).to(wide)
    column_scale = _powers(product.columns, 7, device).to(wide)
    a = torch.outer(row_scale, signs.to(wide)).to(dtype)
    b = torch.outer(column_scale, (signs * terms).to(wide)).to(dtype)
    found = _multiply(a, b, precision, product.layout)
    total = 2 * (product.depth // _SPACING)
    return torch.equal(found, torch.outer(row_scale * total, column_scale))


def _powers(count: int, factor: int, device: torch.device) -> Tensor:
    """1, 2 and 4, with a period that no tile has."""
    return torch.exp2((torch.arange(count, device=device) * factor // 4 % 3).float())


def _multiply(a: Tensor, b: Tensor, precision: Precision, layout: str) -> Tensor:
    """The product a @ b.T of operands that lie in memory as a layer's do."""
    if precision is Precision.FP8:  # in every product both are handed over as they are here
        one = torch.ones((), device=a.device)
        return library.fp8_matmul(a, b, one, one, None, torch.bfloat16)
    if layout != "forward":
        b = b.t().contiguous().t()
    if layout == "grad_weight":
        a = a.t().contiguous().t()
    with arithmetic.without_autocast(a.device.type):
        return arithmetic.matmul(a, b.t(), a.dtype, tf32=precision is Precision.TF32)


def _refusal(
    device: torch.device, precision: Precision, wrong: Sequence[Product], count: int
) -> KernelError:
    name = str(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} with {properties.multi_processor_count} multiprocessors"
    part = os.environ.get(_MPS_PERCENTAGE)
    remedy = "Update torch and the driver, or leave this precision out"
    if part is not None:
        remedy = (
            f"Give this process another part of the GPU than {part} % ({_MPS_PERCENTAGE}; of an"
            " H200 10, 12, 25, 50, 90 and 95 % were right), or leave this precision out"
        )
    return KernelError(
        f"products in {precision}",
        f"{len(wrong)} of {count} are wrong on {name}, the first {wrong[0]}",
        remedy,
    )
