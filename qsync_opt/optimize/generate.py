"""`generate_problem`: seeded random allocation problems of any size, shaped like real networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.evaluate import evaluate_device, follower_columns
from qsync_opt.optimize.problem import (
    AllocationProblem,
    Bucket,
    BucketCode,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.plan import CODE_BITS, FULL_BITS
from qsync_opt.precision import Precision

#: The precisions of a problem with P of them are the first P, in the order of the enum.
_BY_COUNT = (
    Precision.FP32,
    Precision.BF16,
    Precision.INT8,
    Precision.TF32,
    Precision.FP8,
    Precision.FP16,
)
#: Time of a matrix product relative to fp32: one H200, 8192 x 4096 x 4096 (design, section 10).
_RELATIVE_TIME = {
    Precision.FP32: 1.0,
    Precision.TF32: 0.153,
    Precision.BF16: 0.076,
    Precision.FP16: 0.076,
    Precision.FP8: 0.050,
    Precision.INT8: 0.060,
}
#: Rounding noise relative to bf16: squared unit roundoffs (24, 11, 8, 11 bits of significand;
#: 4 for e4m3; 8-bit fixed point with one scale a row behaves like about 6).
_RELATIVE_NOISE = {
    Precision.FP32: 0.0,
    Precision.TF32: 4.0**-3,
    Precision.BF16: 1.0,
    Precision.FP16: 4.0**-3,
    Precision.FP8: 4.0**4,
    Precision.INT8: 4.0**2,
}
_CAST_SECONDS_PER_BYTE = 1 / 300e9  # a T4-class memory system
#: Time of coding a bucket, relative to its all-reduce in 32 bits.
_CODING = 0.05
_GRAPHS = ("branching", "chain")
_COSTS = ("independent", "correlated", "inverse")


@dataclass
class _Graph:
    """A graph under construction: operators, what each reads, and who saves what."""

    operators: list[Operator] = field(default_factory=list)
    adjustable: list[bool] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    saves_input: list[bool] = field(default_factory=list)

    def add(
        self,
        kind: str,
        reads: list[int],
        *,
        follower: bool = False,
        adjustable: bool = False,
        saves: bool = True,
    ) -> int:
        index = len(self.operators)
        follows = tuple(dict.fromkeys(reads)) if follower else ()
        self.operators.append(Operator(name=f"{kind}_{index}", kind=kind, follows=follows))
        self.adjustable.append(adjustable)
        self.reads.append(list(dict.fromkeys(reads)))
        self.saves_input.append(saves)
        return index


def _branching(graph: _Graph, rng: np.random.Generator, operators: int) -> None:
    """Blocks of residual convolutions, attention, feed-forward layers and plain chains."""
    last = graph.add("linear", [], adjustable=True)
    while len(graph.operators) < operators:
        entry = last
        block = rng.choice(4)
        if block == 0:  # plain: product and activation
            last = graph.add("relu", [graph.add("linear", [last], adjustable=True)], follower=True)
        elif block == 1:  # residual: two products around a skip
            inner = graph.add("conv2d", [last], adjustable=True)
            inner = graph.add("relu", [inner], follower=True)
            inner = graph.add("conv2d", [inner], adjustable=True)
            last = graph.add("add", [entry, inner], follower=True, saves=False)
        elif block == 2:  # feed-forward behind a norm
            norm = graph.add("layer_norm", [last])
            inner = graph.add("linear", [norm], adjustable=True)
            inner = graph.add("gelu", [inner], follower=True)
            inner = graph.add("linear", [inner], adjustable=True)
            last = graph.add("add", [entry, inner], follower=True, saves=False)
        else:  # attention behind a norm
            norm = graph.add("layer_norm", [last])
            q, k, v = (graph.add("linear", [norm], adjustable=True) for _ in range(3))
            scores = graph.add("matmul", [q, k], adjustable=True)
            weights = graph.add("softmax", [scores])
            mixed = graph.add("matmul", [weights, v], adjustable=True)
            inner = graph.add("linear", [mixed], adjustable=True)
            last = graph.add("add", [entry, inner], follower=True, saves=False)


def generate_problem(
    *,
    operators: int = 300,
    precisions: int = 4,
    devices: int = 2,
    seed: int = 0,
    tightness: float = 0.3,
    graph: str = "branching",
    costs: str = "independent",
    buckets: int = 8,
    communication: Sequence[int] = (),
) -> AllocationProblem:
    """A random allocation problem, the same for the same arguments on every machine.

    Args:
        operators: N. Most can choose; activations and adds follow, norms and softmax are fixed.
        precisions: P, 1 to 6.
        devices: device kinds, one worker each, equal shares; each kind has its own costs.
        seed: of the random numbers.
        tightness: each kind's memory, and the deadline, are the least achievable by its
            fastest options plus this fraction of the way to all-fp32 (the tightness ratio of
            the OR-Library knapsack sets): 0 leaves no room, 1 never binds.
        graph: `branching` (residual, attention and feed-forward blocks) or `chain`.
        costs: `independent`; `correlated` (the more time a precision saves, the more it
            perturbs: the hard kind of knapsack); `inverse` (the opposite).
        buckets: K.
        communication: fewer bits than 32 that every bucket can be sent in. Times go by bits,
            with a twentieth of 32 bits for coding, and variances by 1 / (2^bits - 1)^2: in all
            at 8 bits a tenth of what all operators add at the precision that perturbs most.

    Raises:
        ParameterError: an argument is out of range.
    """
    for name, value, low, high in (
        ("operators", operators, 1, 10**6),
        ("precisions", precisions, 1, len(_BY_COUNT)),
        ("devices", devices, 1, 1000),
        ("buckets", buckets, 0, 10**4),
        ("seed", seed, 0, 2**63 - 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ParameterError(name, f"must be a whole number from {low} to {high}", value)
    if not 0 <= tightness <= 1:
        raise ParameterError("tightness", "must be from 0 to 1", tightness)
    if graph not in _GRAPHS:
        raise ParameterError("graph", "must be one of " + ", ".join(_GRAPHS), graph)
    if costs not in _COSTS:
        raise ParameterError("costs", "must be one of " + ", ".join(_COSTS), costs)
    counts = _bit_counts(communication)
    rng = np.random.default_rng(seed)
    shape = _Graph()
    if graph == "branching":
        _branching(shape, rng, operators)
    else:
        for index in range(operators):
            shape.add("linear", [index - 1] if index else [], adjustable=True)
    del shape.operators[operators:], shape.adjustable[operators:], shape.reads[operators:]
    names = sorted(_BY_COUNT[:precisions], key=list(Precision).index)
    order = _bucketed(shape, buckets)
    sizes = rng.lognormal(mean=16.0, sigma=1.0, size=operators)  # activation bytes in fp32
    kinds = [
        _device(shape, names, rng, sizes, f"kind{r}", 1.0 + 0.2 * r, 1 / devices, costs)
        for r in range(devices)
    ]
    step_s = kinds[0].forward_s[:, 0].sum() + kinds[0].backward_s[:, 0].sum()
    problem = AllocationProblem(
        name=f"{graph}-{operators}x{precisions}x{devices}-seed{seed}",
        provenance=(
            f"generate_problem(operators={operators}, precisions={precisions},"
            f" devices={devices}, seed={seed}, tightness={tightness}, graph={graph!r},"
            f" costs={costs!r}, buckets={buckets}); not measured"
        ),
        precisions=tuple(names),
        storage=tuple(p.storage for p in names),
        output=tuple(p.output if p.output in names else Precision.FP32 for p in names),
        operators=tuple(order),
        buckets=tuple(
            Bucket(all_reduce_s=float(step_s * 0.01 * rng.uniform(0.5, 1.5)), size_bytes=25 * 2**20)
            for _ in range(buckets)
        ),
        devices=tuple(kinds),
    )
    if counts:
        problem = _with_codes(problem, counts, seed)
    return _with_budgets(problem, tightness)


def _bit_counts(communication: object) -> list[int]:
    """Bits to offer beside 32, each once, descending."""
    least, most = CODE_BITS
    rule = f"must be whole numbers from {least} to {most}"
    if not isinstance(communication, Sequence):
        raise ParameterError("communication", rule, communication)
    for bits in communication:
        if isinstance(bits, bool) or not isinstance(bits, int) or not least <= bits <= most:
            raise ParameterError("communication", rule, bits)
    return sorted(set(communication), reverse=True)


def _with_codes(problem: AllocationProblem, counts: Sequence[int], seed: int) -> AllocationProblem:
    most_variance = sum(
        problem.weight(device) * float(device.perturbation.max(axis=1).sum())
        for device in problem.devices
    )
    rng = np.random.default_rng([seed, len(problem.buckets)])  # leaves the other numbers alone
    buckets = []
    for bucket in problem.buckets:
        variance = 0.1 * most_variance / len(problem.buckets) * rng.uniform(0.5, 1.5)
        codes = tuple(
            BucketCode(
                bits=bits,
                all_reduce_s=bucket.all_reduce_s * (bits / FULL_BITS + _CODING),
                perturbation=variance * (255.0 / (2**bits - 1)) ** 2,
            )
            for bits in counts
        )
        buckets.append(replace(bucket, codes=codes))
    provenance = problem.provenance.replace("); not", f", communication={tuple(counts)}); not")
    return replace(problem, buckets=tuple(buckets), provenance=provenance)


def _bucketed(shape: _Graph, buckets: int) -> list[Operator]:
    """The operators, with parameters shared out evenly to buckets in backward order."""
    owners = [index for index, adjustable in enumerate(shape.adjustable) if adjustable]
    bucket_of = {}
    if buckets:
        for position, index in enumerate(reversed(owners)):
            bucket_of[index] = position * buckets // len(owners)
    return [
        replace(operator, bucket=bucket_of.get(index))
        for index, operator in enumerate(shape.operators)
    ]


def _device(
    shape: _Graph,
    names: list[Precision],
    rng: np.random.Generator,
    sizes: FloatArray,
    name: str,
    speed: float,
    share: float,
    costs: str,
) -> DeviceKind:
    count, columns = len(shape.operators), len(names)
    adjustable = np.array(shape.adjustable)
    follower = np.array([bool(operator.follows) for operator in shape.operators])
    available = _available(names, adjustable, follower)
    base = rng.lognormal(mean=-7.0, sigma=0.8, size=count) / speed
    base[~adjustable] *= 0.1
    relative = np.array([_RELATIVE_TIME[p] for p in names])
    # Memory-bound operators gain only what the bytes shrink by; products gain up to the ratio.
    gain = np.where(adjustable, rng.uniform(0.3, 1.0, size=count), 0.3)
    scale = relative[None, :] ** gain[:, None]
    scale = scale * rng.uniform(0.95, 1.05, size=scale.shape)
    forward = base[:, None] * scale
    backward = forward * rng.uniform(1.8, 2.2, size=(count, 1))
    saving = (forward + backward)[:, :1] - (forward + backward)
    noise = rng.lognormal(mean=0.0, sigma=1.5, size=(count, 1))
    if costs == "correlated":
        noise = np.abs(saving).max(axis=1, keepdims=True) * rng.uniform(0.9, 1.1, size=(count, 1))
    elif costs == "inverse":
        noise = 1 / (np.abs(saving).max(axis=1, keepdims=True) + 1e-6)
    spread = rng.uniform(0.8, 1.25, size=(count, columns))
    perturbation = noise * np.array([_RELATIVE_NOISE[p] for p in names]) * spread
    perturbation[~adjustable] = 0.0
    transient = np.rint(sizes[:, None] * rng.uniform(0.0, 2.0, size=(count, columns)))
    return DeviceKind(
        name=name,
        workers=1,
        batch_share=share,
        memory_bytes=0,
        fixed_bytes=int(sizes.sum() * 0.2),
        optimizer_s=float(base.sum() * 0.05),
        available=available,
        forward_s=forward,
        backward_s=backward,
        perturbation=perturbation,
        forward_transient_bytes=transient.astype(np.int64),
        backward_transient_bytes=transient.astype(np.int64),
        tensors=_tensors(shape, names, sizes),
        saved=_saved(shape, names, sizes),
    )


def _available(names: list[Precision], adjustable: BoolArray, follower: BoolArray) -> BoolArray:
    handed = [p in {q.output for q in names} | {Precision.FP32} for p in names]
    available = np.zeros((len(adjustable), len(names)), dtype=np.bool_)
    available[:, 0] = True
    available[adjustable] = True
    available[follower] = handed
    return available


def _readers(shape: _Graph) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in shape.operators]
    for index, reads in enumerate(shape.reads):
        for source in reads:
            readers[source].append(index)
    return readers


def _tensors(shape: _Graph, names: list[Precision], sizes: FloatArray) -> CastTensors:
    """One tensor per operator with readers; a cast reads one dtype and writes the other."""
    readers = _readers(shape)
    producer = [index for index, consumers in enumerate(readers) if consumers]
    source = np.array([p.output.element_bytes for p in names])
    target = np.array([p.element_bytes for p in names])
    same = np.array([[p.output is q.storage for q in names] for p in names])
    traffic = (source[:, None] + target[None, :]) / 4.0 * ~same
    table = sizes[producer][:, None, None] * _CAST_SECONDS_PER_BYTE * traffic
    return CastTensors.from_rows(
        producer=producer,
        consumers=[readers[index] for index in producer],
        forward_s=table.reshape(len(producer), len(names), len(names)),
        backward_s=table.reshape(len(producer), len(names), len(names)),
    )


def _saved(shape: _Graph, names: list[Precision], sizes: FloatArray) -> SavedTensors:
    """The input of every operator that saves it, one entry per tensor."""
    readers = _readers(shape)
    savers, rows = [], []
    dtypes = list(dict.fromkeys(p.storage for p in names))
    for index, consumers in enumerate(readers):
        keep = [reader for reader in consumers if shape.saves_input[reader]]
        if keep:
            elements = int(sizes[index]) // 4
            savers.append(keep)
            rows.append([elements * dtype.element_bytes for dtype in dtypes])
    return SavedTensors.from_rows(savers=savers, size_bytes=rows, dtypes=dtypes)


def _with_budgets(problem: AllocationProblem, tightness: float) -> AllocationProblem:
    """Memory per kind and the deadline, between the fastest options and all-fp32."""
    kinds, deadline_s = [], 0.0
    soonest = problem.at_bits(problem.fastest_bits)
    for device in problem.devices:
        total = np.where(device.available, device.forward_s + device.backward_s, np.inf)
        fast = _evaluated(soonest, device, total.argmin(axis=1))
        full = _evaluated(problem, device, np.zeros(len(problem.operators), dtype=np.int64))
        least, most = fast.peak_memory_bytes, full.peak_memory_bytes
        budget = least + int(tightness * max(most - least, 0))
        kinds.append(replace(device, memory_bytes=budget))
        low, high = fast.iteration_time_s, full.iteration_time_s
        deadline_s = max(deadline_s, low + tightness * max(high - low, 0.0))
    return replace(problem, devices=tuple(kinds), deadline_s=deadline_s)


def _evaluated(problem: AllocationProblem, device: DeviceKind, column: IntArray):  # type: ignore[no-untyped-def]
    return evaluate_device(problem, device, follower_columns(problem, column))
