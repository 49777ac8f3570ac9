"""Coded communication: `python -m tests.benchmarks.quantized_comm PART [--device cuda]`.

- `link`: step times of DDP on ranks that a slow link joins, for gradients as they are, torch's
  own fp16, bf16 and quantisation hooks, and ours, taking turns in one run, and of FSDP2 with and
  without codes; bytes on the wire as computed and, where the link is the loopback, as its
  counter saw them (of all ranks and whatever else uses it). GPUs talk over TCP loopback
  (peer-to-peer and shared memory are off), CPUs over gloo.
- `codec`: messages made, read and added up beside the copy floor; needs a GPU.
- `perplexity`: training with coded weights and gradients; see `quantized_training`.

Prints tables and keeps them in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.kernels.rounding import RandomKey
from qsync_opt.measure.clock import spread_of
from qsync_opt.measure.model_file import load_model, parse_sizes
from qsync_opt.measure.step import split_batch, to_device
from qsync_opt.measure.uniform import run_loss
from qsync_opt.runtime import bucket_codec, levels
from qsync_opt.runtime.bucket_codec import exempt_parameters
from qsync_opt.runtime.communication import (
    Communication,
    all_reduce_bytes,
    layout_of,
    parse_communication,
)
from qsync_opt.runtime.quantized_comm import compress_gradients
from qsync_opt.runtime.quantized_sharding import quantize_sharding
from tests.benchmarks import quantized_training

RESULTS = Path(__file__).resolve().parent / "results"

#: torch's own quantisation hook, per tensor: an all-gather of int8.
TORCH_INT8 = "torch int8"
#: In front of a word: FSDP2 instead of DDP.
SHARDED = "fsdp "
LINK_VARIANTS = (
    "fp32",
    "bf16",
    "fp16",
    TORCH_INT8,
    "g8",
    "g4",
    "g4l",
    f"{SHARDED}fp32",
    f"{SHARDED}w8g8",
    f"{SHARDED}w4lg4l",
)
LINK_MODELS = {
    "cuda": (
        "models/gpt.py:size=125M,batch_size=4,length=256",
        "models/gpt.py:size=350M,batch_size=2,length=256",
    ),
    "cpu": (
        "models/small_gpt.py:batch_size=2,length=16,width=256,layers=4",
        "models/small_gpt.py:batch_size=2,length=16,width=512,layers=4",
    ),
}
#: NCCL between GPUs of a host over its loopback, as if they were hosts.
SLOW_LINK = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
_WARM_UP = 3
_BUCKET = 1024
_VALUES = 64 * 2**20
_PARTS = 2

#: Bits and schemes that are timed.
CODES = ((8, "stochastic"), (8, "shift"), (4, "stochastic"), (4, "learned"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.quantized_comm")
    parts = ("link", "codec", "perplexity")
    parser.add_argument("parts", nargs="+", choices=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2, help="of link; default: %(default)s")
    parser.add_argument("--models", nargs="*", metavar="FILE[:KEY=VALUE,...]", help="of link")
    parser.add_argument("--variants", nargs="*", metavar="WORD", help="of link or perplexity")
    parser.add_argument("--turns", type=int, default=3, help="of link; default: %(default)s")
    parser.add_argument("--steps", type=int, help="of a turn, or of training")
    parser.add_argument("--seeds", type=int, default=1, help="of training; default: %(default)s")
    parser.add_argument("--values", type=int, default=_VALUES, help="of codec")
    parser.add_argument("--name", default="quantized_comm", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    data: dict[str, Any] = {
        "format": "qsync-opt/benchmark",
        "version": 1,
        "machine": describe_machine(options.device),
        "device": options.device,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        data[part] = []
        for row in {"link": run_link, "codec": run_codec, "perplexity": run_training}[part](
            options
        ):
            data[part].append(row)
            target = options.output / options.name  # a run that is stopped loses nothing
            raw = json.dumps(data, indent=1, allow_nan=False) + "\n"
            target.with_suffix(".json").write_text(raw)
            target.with_suffix(".md").write_text(to_markdown(data))
            sys.stderr.write(json.dumps(row) + "\n")
    sys.stdout.write(to_markdown(data))
    return 0


def describe_machine(device: str) -> dict[str, str]:
    """What the figures depend on."""
    if device == "cuda":
        from tests.benchmarks.kernels import describe_gpu

        nccl: Any = torch.cuda.nccl
        return {**describe_gpu(), "nccl": ".".join(map(str, nccl.version()))}
    return {
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


# --- link --------------------------------------------------------------------------------------


def run_link(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each model and variant."""
    for model in options.models or LINK_MODELS[options.device]:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, model, Path(folder))
            spawn(_rank, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]
            yield from json.loads((Path(folder) / "rows.json").read_text())


def _rank(rank: int, options: argparse.Namespace, text: str, folder: Path) -> None:
    os.environ.update(SLOW_LINK)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=options.ranks,
    )
    path, _, settings = text.partition(":")
    model, batch, loss = load_model(path, parse_sizes(settings.split(",") if settings else []))
    model.to(device)
    inputs, target = split_batch(to_device(batch, device), loss)
    times: dict[str, list[float]] = {}
    seen: dict[str, list[int]] = {}
    sent: dict[str, float] = {}
    failed: dict[str, str] = {}
    steps = options.steps or (10 if device.type == "cuda" else 5)
    for _, word in itertools.product(range(options.turns), options.variants or LINK_VARIANTS):
        if word in failed:
            continue
        try:
            wrapped, count_sent = _wrapped(model, word, device)
            stamps, counter = [], 0
            for step in range(_WARM_UP + steps):
                if step == _WARM_UP:
                    distributed.barrier()
                    counter = _loopback_bytes()
                    before = count_sent()
                    stamps.append(_now(device))
                wrapped.zero_grad(set_to_none=True)
                value: Any = run_loss(wrapped, inputs, target, loss)
                value.backward()
                if step >= _WARM_UP:
                    stamps.append(_now(device))
            distributed.barrier()
            seen.setdefault(word, []).append(_loopback_bytes() - counter)
            sent[word] = (count_sent() - before) / steps
        except (RuntimeError, ValueError, AttributeError) as error:
            failed[word] = str(error).splitlines()[0][:200]
            continue
        times.setdefault(word, []).append(
            statistics.median(b - a for a, b in itertools.pairwise(stamps))
        )
    if rank == 0:
        rows = [
            {
                "model": text,
                "variant": word,
                "step_s": statistics.median(times[word]),
                "spread": spread_of(times[word]),
                "sent_bytes": sent[word] or None,
                "computed_bytes": _computed_bytes(model, word, options.ranks),
                "loopback_bytes": statistics.median(seen[word]) / steps,
                "speedup_over_fp32": _ratio(times, _base(word, "fp32"), word),
                "speedup_over_bf16": _ratio(times, _base(word, "bf16"), word),
            }
            for word in times
        ]
        rows += [{"model": text, "variant": word, "failed": why} for word, why in failed.items()]
        (folder / "rows.json").write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def _wrapped(
    model: nn.Module, word: str, device: torch.device
) -> tuple[nn.Module, Callable[[], int]]:
    """A model that communicates as a word says, and what tells the bytes that our code sent."""
    if word.startswith(SHARDED):
        own: Any = copy.deepcopy(model)
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for module in own.modules():
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(own, mesh=mesh)
        communication = parse_communication(word.removeprefix(SHARDED))
        if communication == Communication():
            return own, lambda: 0
        sharding = quantize_sharding(own, communication)
        return own, lambda: sharding.sent_bytes
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    if word == TORCH_INT8:
        group: Any = wrapped.process_group
        torch_hook: Any = quantization_hooks.quantization_pertensor_hook
        wrapped.register_comm_hook(group, torch_hook)
        return wrapped, lambda: 0
    hook = compress_gradients(wrapped, parse_communication(word))
    return wrapped, lambda: 0 if hook is None else hook.exchange.sent_bytes


def _base(word: str, name: str) -> str:
    return SHARDED + name if word.startswith(SHARDED) else name


def _computed_bytes(model: nn.Module, word: str, world: int) -> float | None:
    """What a rank sends in a step: of a ring for all-reduces, of the formula for codes."""
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if word == TORCH_INT8:
        return (world - 1) * total
    if word.startswith(SHARDED):
        return None  # it depends on which weights are gathered twice
    communication = parse_communication(word)
    if communication.gradients is None:
        size = 2 if communication.cast else 4
        return 2 * (world - 1) / world * size * total
    exempt = {id(p): p.numel() for p in exempt_parameters(model)}
    exact = sum(exempt.values())
    return all_reduce_bytes(total - exact, world, communication.gradients.bits, _BUCKET, exact)


def _ratio(times: dict[str, list[float]], base: str, word: str) -> float | None:
    if base not in times:
        return None
    # Turn by turn: what slows both cancels.
    return statistics.median(a / b for a, b in zip(times[base], times[word], strict=False))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _loopback_bytes() -> int:
    """What the loopback has carried; 0 where that cannot be told."""
    listing = Path("/proc/net/dev")
    lines = listing.read_text().splitlines() if listing.exists() else []
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == ["lo:"]), 0)


# --- codec -------------------------------------------------------------------------------------


def run_codec(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Device seconds of messages made and read, beside copies of as many bytes.

    A sum reads the messages of `_PARTS` ranks and writes one chunk, so it has a floor of its
    own. Ranges, 8 bytes a bucket, count in no floor.
    """
    from tests.benchmarks.kernels import Call, Case, _copy, device_times_s

    device = torch.device("cuda", torch.cuda.current_device())
    count, key = options.values, RandomKey()
    inputs = [torch.randn(count, device=device) for _ in range(2)]
    for bits, scheme in CODES:
        layout = layout_of(count, _PARTS, bits)
        table, mode = None, scheme
        if scheme == "learned":
            mode = "stochastic"
            counts = levels.histogram(inputs[0], layout.bucket)
            table = levels.fit_levels(counts, bits, stochastic=True).to(device)
        code = (layout, mode, key, table)
        rows = [bucket_codec.encode(x, *code) for x in inputs]

        def both(x: Any, own: Any = code) -> Any:
            return bucket_codec.decode(bucket_codec.encode(x, *own), *own)

        halves: dict[str, Sequence[Call]] = {
            "encode": [partial(bucket_codec.encode, x, *code) for x in inputs],
            "decode": [partial(bucket_codec.decode, row, *code) for row in rows],
        }
        whole: dict[str, Sequence[Call]] = {
            f"messages for {_PARTS} ranks and back": [partial(both, x) for x in inputs]
        }
        groups: list[tuple[float, dict[str, Sequence[Call]]]] = [
            (count * (4 + bits / 8), halves),
            (2 * count * (4 + bits / 8), whole),
        ]
        if mode != "shift":
            summed: dict[str, Sequence[Call]] = {
                f"sum of {_PARTS} ranks' messages": [
                    partial(bucket_codec.decode_mean, row, layout, _PARTS, table) for row in rows
                ],
                "decode, then torch's sum": [
                    lambda row=row, c=code: bucket_codec.decode(row, *c).sum(0).div_(_PARTS)  # type: ignore[misc]
                    for row in rows
                ],
            }
            groups.append((count * (bits / 8 + 4 / _PARTS), summed))
        for size_bytes, calls in groups:
            named = {"copy floor": _copy(device, size_bytes), **calls}
            section = f"{bits} bits, {scheme}"
            cases = [
                Case(section=section, shape=str(count), name=name, calls=calls)
                for name, calls in named.items()
            ]
            times_s = device_times_s(cases)
            for case, seconds in zip(cases, times_s, strict=True):
                yield {
                    "coding": section,
                    "values": count,
                    "what": case.name,
                    "floor_bytes": size_bytes,
                    "device_s": seconds,
                    "of_floor": seconds / times_s[0],
                }


# --- perplexity --------------------------------------------------------------------------------


def run_training(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each variant and seed."""
    sizes = quantized_training.SIZES[options.device]
    if options.steps is not None:
        sizes = dataclasses.replace(sizes, steps=options.steps)
    variants = options.variants or quantized_training.VARIANTS
    device = torch.device(options.device)
    exact: dict[int, float] = {}
    for row in quantized_training.runs(variants, options.seeds, sizes, device):
        if row["communication"] == "fp32":
            exact[row["seed"]] = row["perplexity"]
        base = exact.get(row["seed"])
        yield {**row, "of_fp32": None if base is None else row["perplexity"] / base}


# --- tables ------------------------------------------------------------------------------------


def to_markdown(data: dict[str, Any]) -> str:
    """The tables of a run."""
    lines = ["# Coded communication", ""]
    lines += [f"- {name}: {value}" for name, value in data["machine"].items()]
    for part in ("link", "codec", "perplexity"):
        rows = data.get(part)
        if not rows:
            continue
        names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        lines += ["", f"## {part}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        lines += [f"| {' | '.join(_text(row.get(name)) for name in names)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "not finite"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
