"""The GPU kernels beside the library's own: `python -m tests.benchmarks.kernels`.

Everything is timed in one run on random data: each case captures its calls in a CUDA graph,
over several sets of inputs where they would else stay in the L2 cache. The graph is replayed
until the clocks have settled to its power, then the median of further replays counts. Ratios
are to the copy floor (a device copy of as many bytes as the operation must read and write) or
to bf16. Prints a table and keeps it in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.kernels import bucket_library, library, reference
from qsync_opt.kernels.bucket_reference import SCHEMES
from qsync_opt.kernels.registry import registry_of
from qsync_opt.kernels.rounding import Rounding

RESULTS = Path(__file__).resolve().parent / "results"
BF16 = torch.bfloat16

#: M, K, N of products; the first is the goal's, the second the layer's, the rest are BERT's.
PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 4096), (16384, 768, 3072), (4096, 1024, 1024))
LAYER = PRODUCTS[1]
QUANTISED = (16384, 3072)
BUCKETED = 64 * 2**20
BUCKET = 1024

#: ResNet-50 at batch 128, 128 channels or more: channels, size, filters, filter, stride.
CONVOLUTIONS = (
    (128, 28, 128, 3, 1),
    (512, 28, 128, 1, 1),
    (128, 28, 512, 1, 1),
    (256, 56, 128, 1, 1),
    (128, 56, 128, 3, 2),
    (256, 56, 512, 1, 2),
    (256, 14, 256, 3, 1),
    (1024, 14, 256, 1, 1),
    (256, 14, 1024, 1, 1),
    (256, 28, 256, 3, 2),
    (512, 28, 1024, 1, 2),
    (512, 7, 512, 3, 1),
    (2048, 7, 512, 1, 1),
    (512, 7, 2048, 1, 1),
    (512, 14, 512, 3, 2),
)
IMAGES = 128

#: More input sets than the L2 cache holds of the quantised tensor.
_SETS = 4
_CALLS, _ROUNDS = 12, 13
_SETTLE_S = 0.2

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to time.

    Attributes:
        section: of the table.
        shape: what it works on.
        name: of the implementation.
        calls: one call for each set of inputs.
        operations: of the product, both the multiplications and the additions; 0 for none.
        against: name of the case of the same section and shape that the ratio refers to.
    """

    section: str
    shape: str
    name: str
    calls: Sequence[Call]
    operations: float = 0.0
    against: str = "bf16"


def cases(*, divisor: int = 1) -> Iterator[Case]:
    """All cases, made one after the other; `divisor` shrinks the sizes for a dry run."""
    device = torch.device("cuda", torch.cuda.current_device())
    yield from _quantisation(device, divisor)
    for shape in PRODUCTS:
        yield from _products(device, tuple(size // divisor for size in shape))
    layer = tuple(size // divisor for size in LAYER)
    yield from _forward(device, layer)
    yield from _training_step(device, layer)
    for convolution in CONVOLUTIONS:
        yield from _convolutions(device, max(IMAGES // divisor, 1), *convolution)
    yield from _buckets(device, BUCKETED // divisor)


def _copy(device: torch.device, size_bytes: float) -> list[Call]:
    """Copies that read and write as many bytes as an operation must."""
    half = int(size_bytes / 2)
    pairs = [torch.empty((2, half), dtype=torch.uint8, device=device) for _ in range(_SETS)]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]  # type: ignore[misc]


def _quantisation(device: torch.device, divisor: int) -> Iterator[Case]:
    rows, columns = QUANTISED[0] // divisor, QUANTISED[1]
    shape, count = f"{rows} x {columns} bf16", rows * columns
    inputs = [torch.randn(rows, columns, device=device, dtype=BF16) for _ in range(_SETS)]

    def case(section: str, name: str, function: Callable[[Tensor], object], against: str) -> Case:
        calls = [lambda x=x: function(x) for x in inputs]
        return Case(section=section, shape=shape, name=name, calls=calls, against=against)

    section, floor = "quantise, 3 bytes an element", "copy floor"
    copies = _copy(device, 3 * count)
    yield Case(section=section, shape=shape, name=floor, calls=copies, against=floor)
    for granularity in ("row", "tensor", "column"):
        for rounding in Rounding:
            words = f"{granularity}, {rounding.name.lower()}"
            yield case(
                section,
                f"int8, {words}",
                lambda x, g=granularity, r=rounding: library.quantize_int8(x, g, r),  # type: ignore[misc]
                floor,
            )
            yield case(
                section,
                f"e4m3, {words}",
                lambda x, g=granularity, r=rounding: library.quantize_fp8(x, "e4m3", g, r),  # type: ignore[misc]
                floor,
            )
    yield case(
        section, "int8, row, plain torch", lambda x: reference.quantize_int8(x, "row"), floor
    )
    codes = [library.quantize_int8(x, "row") for x in inputs]
    back = [lambda q=q, s=s: library.dequantize(q, s, BF16) for q, s in codes]
    yield Case(section=section, shape=shape, name="dequantise", calls=back, against=floor)
    section = "quantise in both orders, 4 bytes an element"
    copies = _copy(device, 4 * count)
    yield Case(section=section, shape=shape, name=floor, calls=copies, against=floor)
    yield case(
        section, "e4m3, both orders", lambda x: library.quantize_fp8_transposed(x, "e4m3"), floor
    )


def _products(device: torch.device, shape: tuple[int, ...]) -> Iterator[Case]:
    m, k, n = shape
    x, w = (torch.randn(rows, k, device=device, dtype=BF16) for rows in (m, n))
    a, a_scale = library.quantize_int8(x, "row")
    b, b_scale = library.quantize_int8(w, "row")
    bias = torch.randn(n, device=device)
    fa, fa_scale = library.quantize_fp8(x, "e4m3", "tensor")
    fb, fb_scale = library.quantize_fp8(w, "e4m3", "tensor")
    scales = (a_scale, b_scale)
    runs: dict[str, Call] = {
        "bf16": lambda: x @ w.t(),
        "int8, scaled": lambda: library.int8_matmul(a, b, *scales, None, BF16),
        "int8, scaled, bias": lambda: library.int8_matmul(a, b, *scales, bias, BF16),
        "_int_mm, int32 out": lambda: torch._int_mm(a, b.t()),
        "fp8": lambda: library.fp8_matmul(fa, fb, fa_scale, fb_scale, None, BF16),
        "_scaled_mm": lambda: torch._scaled_mm(fa, fb.t(), fa_scale, fb_scale, out_dtype=BF16),
    }
    for name, run in runs.items():
        yield Case(
            section="product",
            shape=f"{m} x {k} x {n}",
            name=name,
            calls=[run],
            operations=2.0 * m * k * n,
        )


def _forward(device: torch.device, shape: tuple[int, ...]) -> Iterator[Case]:
    m, k, n = shape
    x = torch.randn(m, k, device=device, dtype=BF16)
    weight = torch.randn(n, k, device=device)
    half = weight.to(BF16)
    bias = torch.randn(n, device=device)

    def int8(w: Tensor) -> Tensor:
        codes, scale = library.quantize_int8(x, "row")
        w_codes, w_scale = library.quantize_int8(w, "row")
        return library.int8_matmul(codes, w_codes, scale, w_scale, bias, BF16)

    def fp8(w: Tensor, granularity: str = "tensor") -> Tensor:
        codes, scale = library.quantize_fp8(x, "e4m3", granularity)
        w_codes, w_scale = library.quantize_fp8(w, "e4m3", granularity)
        return library.fp8_matmul(codes, w_codes, scale, w_scale, bias, BF16)

    runs: dict[str, Call] = {
        "bf16": lambda: functional.linear(x, half, bias.to(BF16)),
        "int8, bf16 weight": lambda: int8(half),
        "fp8, bf16 weight": lambda: fp8(half),
        "fp8 by rows, bf16 weight": lambda: fp8(half, "row"),
        "bf16, cast from fp32": lambda: functional.linear(x, weight.to(BF16), bias.to(BF16)),
        "int8, fp32 weight": lambda: int8(weight),
        "fp8, fp32 weight": lambda: fp8(weight),
    }
    for name, run in runs.items():
        yield Case(
            section="forward with quantisation",
            shape=f"{m} x {k} x {n}",
            name=name,
            calls=[run],
            operations=2.0 * m * k * n,
        )


def _training_step(device: torch.device, shape: tuple[int, ...]) -> Iterator[Case]:
    m, k, n = shape
    x = torch.randn(m, k, device=device, dtype=BF16)
    grad = torch.randn(m, n, device=device, dtype=BF16)
    weight = torch.randn(n, k, device=device)

    def bf16() -> tuple[Tensor, Tensor, Tensor]:
        half = weight.to(BF16)
        return x @ half.t(), grad @ half, grad.t() @ x

    def fp8() -> tuple[Tensor, Tensor, Tensor]:
        codes, codes_t, scale = library.quantize_fp8_transposed(x, "e4m3")
        w, w_t, w_scale = library.quantize_fp8_transposed(weight, "e4m3")
        g, g_t, g_scale = library.quantize_fp8_transposed(grad, "e5m2")
        return (
            library.fp8_matmul(codes, w, scale, w_scale, None, BF16),
            library.fp8_matmul(g, w_t, g_scale, w_scale, None, BF16),
            library.fp8_matmul(g_t, codes_t, g_scale, scale, None, BF16),
        )

    def int8() -> tuple[Tensor, Tensor, Tensor]:
        codes, scale = library.quantize_int8(x, "row")
        w, w_scale = library.quantize_int8(weight, "row")
        out = library.int8_matmul(codes, w, scale, w_scale, None, BF16)
        saved = library.dequantize(codes, scale, BF16)
        return out, grad @ weight.to(BF16), grad.t() @ saved

    runs: dict[str, Call] = {"bf16": bf16, "fp8": fp8, "int8 output, bf16 gradients": int8}
    for name, run in runs.items():
        yield Case(
            section="training step: output, grad_input, grad_weight",
            shape=f"{m} x {k} x {n}, fp32 weight",
            name=name,
            calls=[run],
            operations=6.0 * m * k * n,
        )


def _convolutions(
    device: torch.device,
    images: int,
    channels: int,
    size: int,
    filters: int,
    window: int,
    step: int,
) -> Iterator[Case]:
    x = torch.randn(images, channels, size, size, device=device, dtype=BF16)
    weight = torch.randn(filters, channels, window, window, device=device, dtype=BF16)
    x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    rows = x.permute(0, 2, 3, 1).reshape(-1, channels)
    codes, scale = library.quantize_int8(rows, "tensor")
    x_codes = codes.view(images, size, size, channels).permute(0, 3, 1, 2)
    flat = weight.permute(0, 2, 3, 1).reshape(filters, -1)
    w_codes, w_scale = library.quantize_int8(flat, "row")
    w_codes = w_codes.view(filters, window, window, channels).permute(0, 3, 1, 2)
    pad = window // 2
    options = ((step, step), (pad, pad), (1, 1), 1, BF16)

    def int8() -> Tensor:
        return library.int8_conv2d(x_codes, w_codes, scale, w_scale.view(-1), None, *options)

    def with_quantisation() -> Tensor:
        q, s = library.quantize_int8(rows, "tensor")
        view = q.view(images, size, size, channels).permute(0, 3, 1, 2)
        return library.int8_conv2d(view, w_codes, s, w_scale.view(-1), None, *options)

    out = size // step
    runs: dict[str, Call] = {
        "bf16": lambda: functional.conv2d(x, weight, None, step, pad),
        "int8": int8,
        "int8 with quantisation": with_quantisation,
    }
    for name, run in runs.items():
        yield Case(
            section="convolution, channels-last, cuDNN bf16",
            shape=f"{images} x {channels} x {size}^2 -> {filters}, {window}x{window} / {step}",
            name=name,
            calls=[run],
            operations=2.0 * images * out**2 * channels * filters * window**2,
        )


def _buckets(device: torch.device, count: int) -> Iterator[Case]:
    inputs = [torch.randn(count, device=device) for _ in range(2)]
    for bits in (8, 4, 3):
        section, floor = f"buckets of {BUCKET}, {bits} bits, fp32", "copy floor"
        shape, copies = f"{count} values", _copy(device, count * (4 + bits / 8))
        yield Case(section=section, shape=shape, name=floor, calls=copies, against=floor)
        layout = (count // BUCKET, BUCKET, bits)
        for scheme in SCHEMES:
            messages = bucket_library.message_encode(inputs[0], 1, *layout, scheme)
            encode = [
                lambda x=x, c=(*layout, scheme): bucket_library.message_encode(x, 1, *c)
                for x in inputs
            ]
            decode: list[Call] = [
                lambda m=messages, c=(*layout, scheme): bucket_library.message_decode(m, *c)  # type: ignore[misc]
            ]
            for name, calls in ((f"encode, {scheme}", encode), (f"decode, {scheme}", decode)):
                yield Case(section=section, shape=shape, name=name, calls=calls, against=floor)


def device_times_s(group: Sequence[Case]) -> list[float]:
    """Median seconds of one call of each case, at the clocks that it settles to."""
    stream: Any = torch.cuda.Stream  # torch leaves these without annotations
    event: Any = torch.cuda.Event
    graphs = []
    for case in group:
        calls = [case.calls[i % len(case.calls)] for i in range(_CALLS)]
        with torch.cuda.stream(stream()):  # warm up: choices, workspaces, plans
            for call in (*case.calls, *case.calls):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
        del kept
        graph.replay()
        torch.cuda.synchronize()
        graphs.append(graph)
    medians = []
    for graph in graphs:
        rounds: list[float] = []
        settled = time.perf_counter() + _SETTLE_S
        while time.perf_counter() < settled or len(rounds) < _ROUNDS:
            start, stop = event(enable_timing=True), event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if time.perf_counter() >= settled:
                rounds.append(float(start.elapsed_time(stop)) / 1e3 / _CALLS)
        medians.append(statistics.median(rounds))
    return medians


def host_time_s(case: Case) -> float:
    """Seconds that the host takes to issue one call, the device left behind."""
    rounds = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(_CALLS):
            case.calls[i % len(case.calls)]()
        rounds.append((time.perf_counter() - start) / _CALLS)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def run(*, divisor: int = 1) -> list[dict[str, Any]]:
    """Time every case; one row each, with the ratio to the case it is held against."""
    rows: list[dict[str, Any]] = []
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        for _, grouped in itertools.groupby(
            cases(divisor=divisor), key=lambda case: (case.section, case.shape)
        ):
            group = list(grouped)
            times_s = dict(zip((case.name for case in group), device_times_s(group), strict=True))
            rows += [_row(case, times_s) for case in group]
    finally:
        torch.backends.cudnn.benchmark = benchmark
    return rows


def _row(case: Case, times_s: dict[str, float]) -> dict[str, Any]:
    seconds, base = times_s[case.name], times_s[case.against]
    return {
        "section": case.section,
        "shape": case.shape,
        "name": case.name,
        "device_s": seconds,
        "host_s": host_time_s(case),
        "operations_per_s": case.operations / seconds,
        "against": case.against,
        # Of a floor: how many times longer; of bf16: how many times faster.
        "ratio": seconds / base if case.against == "copy floor" else base / seconds,
    }


def describe_gpu() -> dict[str, str]:
    """What the figures depend on."""
    query = "driver_version,clocks.sm,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    cudnn: Any = torch.backends.cudnn
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        query: done.stdout.strip(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn.version()),
        "date": time.strftime("%Y-%m-%d"),
    }


def to_markdown(data: dict[str, Any]) -> str:
    """The table of a run, one part a section and shape."""
    lines = ["# Kernels", ""]
    lines += [f"- {name}: {value}" for name, value in data["machine"].items()]
    lines += ["", "Medians of graph replays on random data; host: time to issue a call.", ""]
    header = "| case | µs | TOP/s | ratio | host µs |\n|---|--:|--:|--:|--:|"
    part: tuple[str, str] | None = None
    for row in data["rows"]:
        if part != (row["section"], row["shape"]):
            part = row["section"], row["shape"]
            kind = "time / floor" if row["against"] == "copy floor" else "bf16 time / time"
            lines += ["", f"**{part[0]}: {part[1]}** (ratio: {kind})", "", header]
        rate = row["operations_per_s"]
        shown = f"{rate / 1e12:.0f}" if rate else ""
        lines.append(
            f"| {row['name']} | {row['device_s'] * 1e6:.1f} | {shown} | {row['ratio']:.2f}"
            f" | {row['host_s'] * 1e6:.0f} |"
        )
    lines += ["", "## Choices", "", "| shape | runs | why |", "|---|---|---|"]
    for key, choice in data["choices"].items():
        lines.append(f"| {key} | {choice['implementation']} | {choice['reason']} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.kernels", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--name", default="kernels-h200", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--divisor", type=int, default=1, help="shrinks the sizes: a dry run")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("a GPU is needed: these kernels run on nothing else\n")
        return 2
    torch.manual_seed(0)
    rows = run(divisor=options.divisor)
    choices = registry_of(torch.cuda.current_device()).choices
    data = {
        "format": "qsync-opt/kernel-benchmark",
        "version": 1,
        "machine": describe_gpu(),
        "rows": rows,
        "choices": {key: dataclasses.asdict(choice) for key, choice in choices.items()},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / options.name
    target.with_suffix(".json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    target.with_suffix(".md").write_text(to_markdown(data))
    sys.stdout.write(to_markdown(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
