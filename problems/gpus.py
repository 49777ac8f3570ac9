"""Peak rates and memory of six GPUs, from their data sheets, dense (no structured sparsity).

Each figure is what the vendor prints, not a measurement. Where the sheet gives tensor rates
with sparsity (H200, L4), half of the figure is used, as the sheet's footnote says. A precision
that is missing from `flops` is one that the GPU's matrix units do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync_opt.precision import Precision

_GB = 10**9
_TERA = 10**12


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, by its data sheet.

    Attributes:
        name: full name, with form factor and memory.
        memory_bytes: memory, decimal gigabytes as printed.
        memory_bytes_per_s: bandwidth of the memory.
        peer_bytes_per_s: one direction of the link to the other GPUs of the host.
        flops: peak rate per precision, operations per second, a multiply-add being two.
        source: where the figures are printed.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peer_bytes_per_s: float
    flops: Mapping[Precision, float]
    source: str


def _rates(**tera: float) -> dict[Precision, float]:
    return {Precision(name): value * _TERA for name, value in tera.items()}


V100 = Gpu(
    name="V100 SXM2 32 GB",
    memory_bytes=32 * _GB,
    memory_bytes_per_s=900 * _GB,
    peer_bytes_per_s=150 * _GB,
    flops=_rates(fp32=15.7, fp16=125),
    source=(
        "NVIDIA V100 data sheet,"
        " images.nvidia.com/content/technologies/volta/pdf/"
        "volta-v100-datasheet-update-us-1165301-r5.pdf"
    ),
)

T4 = Gpu(
    name="T4 16 GB",
    memory_bytes=16 * _GB,
    memory_bytes_per_s=300 * _GB,
    peer_bytes_per_s=16 * _GB,
    flops=_rates(fp32=8.1, fp16=65, int8=130),
    source=(
        "NVIDIA T4 data sheet,"
        " www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
        "t4-tensor-core-datasheet-951643.pdf"
    ),
)

A100 = Gpu(
    name="A100 SXM4 80 GB",
    memory_bytes=80 * _GB,
    memory_bytes_per_s=2039 * _GB,
    peer_bytes_per_s=300 * _GB,
    flops=_rates(fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624),
    source=(
        "NVIDIA A100 data sheet,"
        " www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
    ),
)

A10 = Gpu(
    name="A10 24 GB",
    memory_bytes=24 * _GB,
    memory_bytes_per_s=600 * _GB,
    peer_bytes_per_s=32 * _GB,
    flops=_rates(fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250),
    source=(
        "NVIDIA A10 data sheet,"
        " www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
    ),
)

H200 = Gpu(
    name="H200 SXM 141 GB",
    memory_bytes=141 * _GB,
    memory_bytes_per_s=4800 * _GB,
    peer_bytes_per_s=450 * _GB,
    flops=_rates(fp32=67, tf32=989 / 2, bf16=1979 / 2, fp16=1979 / 2, fp8=3958 / 2, int8=3958 / 2),
    source="NVIDIA H200 data sheet, www.nvidia.com/en-us/data-center/h200 (halved: no sparsity)",
)

L4 = Gpu(
    name="L4 24 GB",
    memory_bytes=24 * _GB,
    memory_bytes_per_s=300 * _GB,
    peer_bytes_per_s=32 * _GB,
    flops=_rates(fp32=30.3, tf32=120 / 2, bf16=242 / 2, fp16=242 / 2, fp8=485 / 2, int8=485 / 2),
    source="NVIDIA L4 data sheet, www.nvidia.com/en-us/data-center/l4 (halved: no sparsity)",
)
