"""The instances: which there are, and how each is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from problems.convolutional import resnet50, vgg16_bn
from problems.gpus import A10, A100, H200, L4, T4, V100
from problems.hard import equal_sensitivities, short_of_memory, tight_memory, wide_sensitivities
from problems.hawq import SOURCE, hawq_resnet18, hawq_resnet50
from problems.measured import (
    CPU_MODELS,
    MODELS,
    SHARES,
    SLOW_LINK_MODELS,
    STRONG,
    MeasuredModel,
    at_uniform,
    cpu_problem,
    is_there,
    measured_problem,
    slow_link_problem,
)
from problems.roofline import (
    ETHERNET_10,
    ETHERNET_100,
    INFINIBAND_400,
    Workers,
    roofline_problem,
    rounded,
)
from problems.transformers import bert_base, decoder_70b, gpt2_small
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    from problems.shapes import Network

#: Bytes that the infeasible instance lacks.
SHORTFALL_BYTES = 4097
_ROOFLINE = "architecture shapes x data-sheet roofline, synthetic perturbation"
_SECONDS = "seconds, bytes; perturbation in parts per billion of the squared gradient"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance of the catalogue.

    Attributes:
        file: name of its file in `problems/`.
        make: builds the problem.
        origin: where the numbers come from, one phrase.
        units: what times, sizes and perturbations are in.
        feasible: whether a plan exists.
        shortfall_bytes: memory that an infeasible one lacks.
        mps: whether an MPS file is kept beside it.
    """

    file: str
    make: Callable[[], AllocationProblem]
    origin: str
    units: str
    feasible: bool = True
    shortfall_bytes: int = 0
    mps: bool = False

    @property
    def name(self) -> str:
        """The file's name without endings."""
        return self.file.split(".", maxsplit=1)[0]


def at_pace(
    problem: AllocationProblem, kind: str, precision: Precision, factor: float = 1.0
) -> AllocationProblem:
    """`problem` with the deadline at which a kind runs at one precision throughout.

    Operators without that precision run in fp32. The deadline is `factor` times that, rounded
    up to a microsecond.
    """
    part = at_uniform(problem, kind, precision)
    deadline_s = math.ceil(part.iteration_time_s * factor * 1e6) / 1e6
    return replace(problem, deadline_s=deadline_s)


def _resnet50_v100_t4() -> AllocationProblem:
    workers = (
        Workers(name="v100", gpu=V100, count=2, batch=64),
        Workers(name="t4", gpu=T4, count=2, batch=48, memory_bytes=33 * 10**8),
    )
    problem = roofline_problem(
        name="resnet50-v100-t4",
        model=resnet50,
        workers=workers,
        link=ETHERNET_10,
        optimizer="sgd",
        note=(
            "The T4s may use 3.3 GB only: they share their memory with inference."
            " Deadline: the pace of the V100s all in fp32."
        ),
    )
    return at_pace(problem, "v100", Precision.FP32)


def _vgg16_v100_t4() -> AllocationProblem:
    workers = (
        Workers(name="v100", gpu=V100, count=2, batch=64),
        Workers(name="t4", gpu=T4, count=2, batch=26),
    )
    return roofline_problem(
        name="vgg16-bn-v100-t4",
        model=vgg16_bn,
        workers=workers,
        link=ETHERNET_100,
        optimizer="sgd",
        note="Deadline: none given, slack 0 (the pace of the fastest feasible plan).",
    )


def _bert_v100_t4() -> AllocationProblem:
    workers = (
        Workers(name="v100", gpu=V100, count=2, batch=16),
        Workers(name="t4", gpu=T4, count=2, batch=12),
    )
    problem = roofline_problem(
        name="bert-base-v100-t4",
        model=bert_base,
        workers=workers,
        link=ETHERNET_100,
        optimizer="adam",
        note="384 tokens. Deadline: the pace of the V100s all in fp32.",
    )
    return at_pace(problem, "v100", Precision.FP32)


def _bert_a100_a10() -> AllocationProblem:
    workers = (
        Workers(name="a100", gpu=A100, count=1, batch=32),
        Workers(name="a10", gpu=A10, count=1, batch=12),
    )
    problem = roofline_problem(
        name="bert-base-a100-a10",
        model=bert_base,
        workers=workers,
        link=ETHERNET_100,
        optimizer="adam",
        note="384 tokens. Deadline: the pace of the A100 all in tf32.",
    )
    return at_pace(problem, "a100", Precision.TF32)


def _gpt2_a100_a10() -> AllocationProblem:
    workers = (
        Workers(name="a100", gpu=A100, count=4, batch=28),
        Workers(name="a10", gpu=A10, count=4, batch=10),
    )
    return roofline_problem(
        name="gpt2-small-a100-a10",
        model=gpt2_small,
        workers=workers,
        link=ETHERNET_100,
        optimizer="adam",
        slack=0.05,
        note="1024 tokens; the A10s cannot hold the batch in fp32. Slack 5 %.",
    )


def _resnet50_h200_l4() -> AllocationProblem:
    workers = (
        Workers(name="h200", gpu=H200, count=1, batch=320),
        Workers(name="l4", gpu=L4, count=2, batch=32),
    )
    problem = roofline_problem(
        name="resnet50-h200-l4",
        model=resnet50,
        workers=workers,
        link=ETHERNET_100,
        optimizer="sgd",
        note="Deadline: the pace of the H200 all in tf32.",
    )
    return at_pace(problem, "h200", Precision.TF32)


def _decoder_stage(batch: int) -> Network:
    return decoder_70b(batch, layers=8, shards=8, embedding=False)


def _decoder_h200_l4() -> AllocationProblem:
    workers = (
        Workers(name="h200", gpu=H200, count=1, batch=9),
        Workers(name="l4", gpu=L4, count=1, batch=1),
    )
    problem = roofline_problem(
        name="decoder-70b-stage-h200-l4",
        model=_decoder_stage,
        workers=workers,
        link=INFINIBAND_400,
        optimizer="adam",
        note=(
            "One GPU's share: the last of ten pipeline stages (8 of 80 layers and the head),"
            " split over 8 tensor-parallel GPUs; sequences of 2048 tokens; two data-parallel"
            " replicas, one of each kind. Deadline: the pace of the H200 all in tf32."
        ),
    )
    return at_pace(problem, "h200", Precision.TF32)


def _infeasible() -> AllocationProblem:
    return short_of_memory(_vgg16_v100_t4(), "t4", SHORTFALL_BYTES)


def _generated() -> AllocationProblem:
    """A generated problem of six digits: the last bit of powers differs between processors."""
    problem = generate_problem(
        operators=300, precisions=4, devices=2, seed=0, tightness=0.3, graph="branching"
    )
    return replace(
        problem,
        name="generated-300",
        provenance=problem.provenance + "; times and perturbations rounded to six digits",
        buckets=tuple(replace(b, all_reduce_s=rounded(b.all_reduce_s)) for b in problem.buckets),
        devices=tuple(_rounded_device(device) for device in problem.devices),
        deadline_s=rounded(problem.deadline_s or 0.0),
    )


def _rounded_device(device: DeviceKind) -> DeviceKind:
    def table(values: FloatArray) -> FloatArray:
        flat = [rounded(value) for value in values.ravel().tolist()]
        return np.array(flat, dtype=np.float64).reshape(values.shape)

    tensors = device.tensors
    return replace(
        device,
        optimizer_s=rounded(device.optimizer_s),
        forward_s=table(device.forward_s),
        backward_s=table(device.backward_s),
        perturbation=table(device.perturbation),
        tensors=replace(
            tensors, forward_s=table(tensors.forward_s), backward_s=table(tensors.backward_s)
        ),
    )


def _roofline(file: str, make: Callable[[], AllocationProblem], *, mps: bool = False) -> Instance:
    return Instance(file=file, make=make, origin=_ROOFLINE, units=_SECONDS, mps=mps)


_MEASURED_UNITS = "seconds, bytes; perturbation in units of the squared gradient of the mean loss"


def _measured(model: MeasuredModel, share: int) -> Instance:
    return Instance(
        file=f"{model.name}-{STRONG}-{share}.json.gz",
        make=partial(measured_problem, model, share),
        origin=(
            f"{model.file}, measured on an NVIDIA H200 at 100 % and {share} % of its"
            " multiprocessors; indicator `variance`; all-reduce over NVLink"
        ),
        units=_MEASURED_UNITS,
    )


def _slow_link(model: MeasuredModel, share: int) -> Instance:
    found = _measured(model, share)
    return replace(
        found,
        file=f"{model.name}-{STRONG}-{share}-tcp.json.gz",
        make=partial(slow_link_problem, model, share),
        origin=f"{model.file}, measured as above; all-reduce over TCP at 32, 16, 8 and 4 bits",
    )


def _cpu(model: MeasuredModel, memory_bytes: int) -> Instance:
    return Instance(
        file=f"{model.name}-cpu.json.gz",
        make=partial(cpu_problem, model, memory_bytes),
        origin=(
            f"{model.file}, measured on two virtual cores of an Intel Xeon with two threads and"
            f" with one, which has {memory_bytes / 1e6:g} MB; indicator `variance`; all-reduce by"
            " gloo between two processes"
        ),
        units=_MEASURED_UNITS,
    )


#: Those for which every file is in `measured/`, the larger share first.
_MEASURED = (
    *(_measured(model, share) for share in SHARES for model in MODELS if is_there(model, share)),
    *(_slow_link(model, SHARES[0]) for model in SLOW_LINK_MODELS),
    *(_cpu(model, memory_bytes) for model, memory_bytes in CPU_MODELS),
)

_HAWQ_UNITS = "seconds of inference, bytes of weights; perturbation = trace x squared error"

INSTANCES = (
    *_MEASURED,
    Instance(
        file="hawq-v3-resnet18-t4.json",
        make=hawq_resnet18,
        origin=SOURCE,
        units=_HAWQ_UNITS,
        mps=True,
    ),
    Instance(file="hawq-v3-resnet50-t4.json", make=hawq_resnet50, origin=SOURCE, units=_HAWQ_UNITS),
    _roofline("resnet50-v100-t4.json.gz", _resnet50_v100_t4, mps=True),
    _roofline("vgg16-bn-v100-t4.json.gz", _vgg16_v100_t4),
    _roofline("bert-base-v100-t4.json.gz", _bert_v100_t4),
    _roofline("bert-base-a100-a10.json.gz", _bert_a100_a10),
    _roofline("gpt2-small-a100-a10.json.gz", _gpt2_a100_a10),
    _roofline("resnet50-h200-l4.json.gz", _resnet50_h200_l4),
    _roofline("decoder-70b-stage-h200-l4.json.gz", _decoder_h200_l4),
    Instance(
        file="infeasible-vgg16-bn-v100-t4.json.gz",
        make=_infeasible,
        origin=f"vgg16-bn-v100-t4 with {SHORTFALL_BYTES} bytes too little on the T4",
        units=_SECONDS,
        feasible=False,
        shortfall_bytes=SHORTFALL_BYTES,
    ),
    Instance(
        file="tight-80gb.json",
        make=tight_memory,
        origin="constructed: the optimum fills 80 GB to the byte",
        units="seconds, bytes; perturbation in whole units",
        mps=True,
    ),
    Instance(
        file="equal-sensitivities.json",
        make=equal_sensitivities,
        origin="constructed: every lowered precision costs the same",
        units="ticks of 2^-20 s, bytes; perturbation 1 each",
    ),
    Instance(
        file="sixty-decades.json",
        make=wide_sensitivities,
        origin="constructed: perturbations from 1e-30 to 1e30",
        units="ticks of 2^-20 s, bytes; perturbation over 60 decades",
    ),
    Instance(
        file="generated-300.json.gz",
        make=_generated,
        origin="generate_problem(operators=300, precisions=4, devices=2, seed=0)",
        units="seconds, bytes; perturbation relative (random)",
    ),
)

BY_NAME: Mapping[str, Instance] = {instance.name: instance for instance in INSTANCES}
