"""`build_problem`: a graph, the costs of several device kinds, and a cluster as a problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qsync_opt.build_codes import bucket_codes
from qsync_opt.costs import (
    AllReduceCosts,
    Cluster,
    ClusterKind,
    DeviceCosts,
    GradientBucket,
)
from qsync_opt.device_tables import DeviceTables
from qsync_opt.errors import CostsError, ParameterError
from qsync_opt.graph import OperatorGraph
from qsync_opt.optimize.problem import AllocationProblem, Bucket, BucketCode, Operator
from qsync_opt.perturbation import PerturbationTable
from qsync_opt.precision import Precision

Perturbations = PerturbationTable | Mapping[str, PerturbationTable]


def build_problem(
    graph: OperatorGraph,
    costs: Mapping[str, DeviceCosts],
    perturbation: Perturbations,
    cluster: Cluster,
    *,
    name: str | None = None,
    precisions: Iterable[Precision] | None = None,
    bits: Iterable[int] = (),
    deadline_s: float | None = None,
    slack: float = 0.0,
) -> AllocationProblem:
    """The allocation problem of training a model on a cluster.

    Args:
        graph: the captured graph.
        costs: device kind -> what was measured on it for this graph.
        perturbation: one table for all kinds, or one for each.
        cluster: how many workers of which kinds, and the network.
        name: of the problem; default: the graph's.
        precisions: columns; default: all that some kind has.
        bits: that each bucket of gradients may be sent at instead of 32: 16, or 8 to 2. Not
            for a single worker, which sends nothing.
        deadline_s: the iteration time to keep, seconds; None for (1 + slack) x the fastest.
        slack: see `deadline_s`.

    Raises:
        CostsError: costs of another graph, kinds without costs or without buckets, or
            averages that were not timed at the bits.
        ParameterError: a table for another graph, one without ranges of gradients where there
            are bits, or an inconsistent cluster.
        ProblemError: the result breaks a rule of the format, for example because an operator
            has no precision left on some kind.
    """
    _check_kinds(graph, costs, cluster)
    columns = _columns(costs, cluster, precisions)
    tables = _tables(graph, perturbation, cluster)
    buckets = _common_buckets(costs, cluster)
    devices = []
    for kind in cluster.kinds:
        share = 1 / cluster.workers if kind.batch_share is None else kind.batch_share
        made = DeviceTables(graph, costs[kind.name], tables[kind.name], columns, cluster.workers)
        devices.append(made.kind(kind, share))
    reduce = cluster.all_reduce or _slowest(costs, cluster)
    times = [_all_reduce_s(bucket, reduce, cluster) for bucket in buckets]
    codes: list[tuple[BucketCode, ...]] = [()] * len(buckets)
    wanted = tuple(bits)
    if wanted and reduce is not None and cluster.workers > 1:
        codes = bucket_codes(buckets, wanted, reduce, tables, cluster)
    bucket_of = _bucket_of_operators(graph, buckets)
    half = costs[cluster.kinds[0].name].half
    return AllocationProblem(
        name=graph.name if name is None else name,
        provenance=_provenance(graph, costs, tables, cluster),
        precisions=columns,
        storage=tuple(precision.storage for precision in columns),
        output=tuple(
            half if precision.output is not precision.storage else precision.output
            for precision in columns
        ),
        operators=tuple(
            Operator(name=row.name, kind=row.kind, bucket=bucket_of[index], follows=row.follows)
            for index, row in enumerate(graph.operators)
        ),
        buckets=tuple(
            Bucket(all_reduce_s=time_s, size_bytes=bucket.size_bytes, codes=ways)
            for bucket, time_s, ways in zip(buckets, times, codes, strict=True)
        ),
        groups=_groups(graph),
        devices=tuple(devices),
        deadline_s=deadline_s,
        slack=slack,
    )


def version_warnings(costs: Mapping[str, DeviceCosts]) -> tuple[str, ...]:
    """What kinds were measured with that others were not: predictions may not hold.

    Args:
        costs: device kind -> what was measured on it.
    """
    warnings = [f"{kind}: {text}" for kind, row in costs.items() for text in row.warnings]
    for what, found in (
        ("torch", {k: row.provenance.versions.get("torch", "") for k, row in costs.items()}),
        ("driver", {k: row.provenance.driver for k, row in costs.items()}),
    ):
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{kind}: {version or 'none'}" for kind, version in found.items())
            warnings.append(f"measured with different versions of {what} ({listed})")
    return tuple(warnings)


def network_warnings(cluster: Cluster) -> tuple[str, ...]:
    """Whether all-reduces were timed on another group than that of the job.

    Args:
        cluster: the job; without times of its own those of its size are taken.
    """
    reduce = cluster.all_reduce
    if reduce is None or cluster.workers in (1, reduce.ranks):
        return ()
    return (
        f"all-reduces were measured on {reduce.ranks} ranks, and the job has {cluster.workers}",
    )


def _check_kinds(graph: OperatorGraph, costs: Mapping[str, DeviceCosts], cluster: Cluster) -> None:
    if not cluster.kinds:
        raise ParameterError("cluster", "must have at least one kind", cluster.kinds)
    names = [kind.name for kind in cluster.kinds]
    if len(set(names)) != len(names):
        raise ParameterError("cluster", "must name each kind once", names)
    for kind in cluster.kinds:
        row = costs.get(kind.name)
        if row is None:
            known = ", ".join(costs) or "none"
            raise CostsError("costs", f"must have every kind (it has {known})", kind.name)
        if row.graph_sha256 != graph.sha256:
            raise CostsError(
                f"costs.{kind.name}.graph_sha256",
                f"must be that of the graph ({graph.sha256[:12]}...)",
                row.graph_sha256,
                "Measure with this graph; capture and measure with equal sizes and batch",
            )
    halves = {costs[name].half for name in names}
    if len(halves) > 1:
        raise CostsError(
            "costs",
            "must agree on what 8-bit products hand on",
            sorted(halves),
            "A problem has one dtype for all kinds; leave 8-bit precisions out of one of them",
        )


def _columns(
    costs: Mapping[str, DeviceCosts], cluster: Cluster, wanted: Iterable[Precision] | None
) -> tuple[Precision, ...]:
    has = {p for kind in cluster.kinds for p in costs[kind.name].precisions}
    chosen = has if wanted is None else set(wanted) | {Precision.FP32}
    for precision in chosen - has:
        known = ", ".join(p for p in Precision if p in has)
        raise ParameterError("precisions", f"must be of {known}, which was measured", precision)
    # A follower runs in what is handed on to it, so those dtypes have to be columns.
    half = costs[cluster.kinds[0].name].half
    if any(p.output is not p.storage for p in chosen):
        chosen.add(half)
    return tuple(p for p in Precision if p in chosen)


def _tables(
    graph: OperatorGraph, perturbation: Perturbations, cluster: Cluster
) -> dict[str, PerturbationTable]:
    tables = {}
    for kind in cluster.kinds:
        table = (
            perturbation
            if isinstance(perturbation, PerturbationTable)
            else perturbation.get(kind.name)
        )
        if table is None:
            raise ParameterError("perturbation", "must have a table for every kind", kind.name)
        field = f"perturbation of {kind.name}"
        if table.graph != graph.sha256:
            rule = f"must be for the graph ({graph.sha256[:12]}...)"
            raise ParameterError(field, rule, table.graph, "Compute it with this graph")
        known = set(table.operators)
        missing = next((row.name for row in graph.operators if row.name not in known), None)
        if missing is not None:
            rule = f"must have every operator of the graph ({missing} is missing)"
            found = f"{len(known)} operators"
            raise ParameterError(field, rule, found, "Compute it with this graph")
        tables[kind.name] = table
    return tables


def _common_buckets(
    costs: Mapping[str, DeviceCosts], cluster: Cluster
) -> tuple[GradientBucket, ...]:
    """The buckets that the kinds agree on.

    Raises:
        CostsError: nobody read any, or kinds differ.
    """
    found = {
        kind.name: costs[kind.name].buckets for kind in cluster.kinds if costs[kind.name].buckets
    }
    if not found:
        raise CostsError(
            "costs.buckets",
            "must have been read on some kind",
            [],
            "Measure with the model: buckets are read from a live DDP object",
        )
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise CostsError(
                "costs.buckets",
                f"must be equal on all kinds, and those of {first} and {other} are not",
                len(found[other]),
                "Measure all kinds with equal options of DDP",
            )
    return found[first]


def _bucket_of_operators(
    graph: OperatorGraph, buckets: Sequence[GradientBucket]
) -> list[int | None]:
    """Per operator the first bucket that waits for it.

    An operator whose parameters are in two buckets holds up the earlier one; the later one
    waits for other operators, and for the earlier one, anyway.
    """
    bucket_of = {name: k for k, bucket in enumerate(buckets) for name in bucket.parameters}
    result: list[int | None] = []
    for parameters in graph.completes:
        names = [
            n for i in parameters for n in (graph.parameters[i].name, *graph.parameters[i].aliases)
        ]
        found = [bucket_of[name] for name in names if name in bucket_of]
        result.append(min(found, default=None))
    return result


def _slowest(costs: Mapping[str, DeviceCosts], cluster: Cluster) -> AllReduceCosts | None:
    found = [costs[kind.name].all_reduce for kind in cluster.kinds]
    measured = [row for row in found if row is not None and row.ranks == cluster.workers]
    return max(measured, key=lambda row: float(row.time_s[-1] / row.size_bytes[-1]), default=None)


def _all_reduce_s(bucket: GradientBucket, reduce: AllReduceCosts | None, cluster: Cluster) -> float:
    if cluster.workers == 1:
        return 0.0
    if reduce is None:
        raise CostsError(
            "cluster.all_reduce",
            f"must have been measured on a group of {cluster.workers} ranks",
            None,
            "Measure under torchrun, or with --ranks, and pass what it gives",
        )
    return reduce.time(bucket.size_bytes)


def _groups(graph: OperatorGraph) -> tuple[tuple[str, ...], ...]:
    """The graph's groups, merged where they overlap."""
    merged: list[set[int]] = []
    for group in graph.groups:
        members = set(group.operators)
        for other in [other for other in merged if other & members]:
            members |= other
            merged.remove(other)
        merged.append(members)
    ordered = sorted(sorted(members) for members in merged)
    return tuple(tuple(graph.operators[i].name for i in members) for members in ordered)


def _provenance(
    graph: OperatorGraph,
    costs: Mapping[str, DeviceCosts],
    tables: Mapping[str, PerturbationTable],
    cluster: Cluster,
) -> str:
    source = graph.provenance
    sizes = ", ".join(f"{key}={value}" for key, value in source.sizes.items())
    parts = [f"{source.model}({sizes}), batch " + ", ".join(source.batch.values())]
    for kind in cluster.kinds:
        where = costs[kind.name].provenance
        limit = f"{where.threads} threads" if where.device_type == "cpu" else f"{where.share} %"
        versions = ", ".join(f"{key} {value}" for key, value in where.versions.items())
        parts.append(f"{kind.name}: {where.device}, {limit}, {versions}, measured {where.date}")
    methods = sorted({table.method for table in tables.values()})
    parts.append(f"optimizer {costs[cluster.kinds[0].name].optimizer.name}")
    parts.append(f"perturbation {', '.join(methods)}")
    return "; ".join(parts)


def cluster_kind(name: str, **settings: object) -> ClusterKind:
    """A kind from settings as text or numbers, for the command line.

    Raises:
        ParameterError: an unknown setting or a value that is no number.
    """
    known = {"workers": int, "share": float, "memory_gb": float}
    values: dict[str, float] = {}
    for key, value in settings.items():
        if key not in known:
            raise ParameterError("kind", f"must have only the settings {', '.join(known)}", key)
        try:
            values[key] = known[key](str(value))
        except ValueError:
            raise ParameterError("kind", f"must give a number for {key}", value) from None
    memory_gb = values.get("memory_gb")
    return ClusterKind(
        name=name,
        workers=int(values.get("workers", 1)),
        batch_share=values.get("share"),
        memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
    )
