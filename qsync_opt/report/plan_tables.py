"""Tables of plans: what each costs, on every kind of device, and how it sends gradients."""

from __future__ import annotations

from qsync_opt import console
from qsync_opt.optimize.buckets import chosen
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.tables import Table


def all_tables(inputs: ReportInputs) -> tuple[Table, ...]:
    """The tables of some plans; that of buckets where their bits are a decision."""
    tables = (_plan_table(inputs), _kind_table(inputs))
    return (*tables, _bucket_table(inputs)) if inputs.problem.has_codes else tables


def _plan_table(inputs: ReportInputs) -> Table:
    found = {} if inputs.comparison is None else {r.method: r for r in inputs.comparison.rows}
    best = min(part.perturbation for part in inputs.evaluations.values())
    rows = []
    for name, part in inputs.evaluations.items():
        row = found.get(name)
        rows.append(
            (
                name,
                part.perturbation,
                part.perturbation / best if best else None,
                None if row is None else row.bound,
                None if row is None else row.gap,
                part.iteration_time_s,
                inputs.deadline_s,
                part.feasible,
                "; ".join(str(broken) for broken in part.violations[:2]),
                None if row is None else console.status_name(row.status.name),
                None if row is None else row.solve_s,
            )
        )
    columns = (
        "plan",
        "perturbation",
        "times_best",
        "bound",
        "gap",
        "iteration_time_s",
        "deadline_s",
        "feasible",
        "broken_rules",
        "status",
        "solve_s",
    )
    return _without_empty(
        Table(name="plans", title="Plans by name", columns=columns, rows=tuple(rows))
    )


def _kind_table(inputs: ReportInputs) -> Table:
    rows = []
    for name, evaluation in inputs.evaluations.items():
        for device in inputs.problem.devices:
            part = evaluation.devices[device.name]
            rows.append(
                (
                    name,
                    device.name,
                    device.workers,
                    device.batch_share,
                    part.perturbation,
                    part.compute_s,
                    part.cast_forward_s + part.cast_backward_s,
                    part.iteration_time_s,
                    part.peak_memory_bytes,
                    device.memory_bytes,
                    part.peak_operator,
                )
            )
    columns = (
        "plan",
        "device_kind",
        "workers",
        "batch_share",
        "perturbation",
        "compute_s",
        "cast_s",
        "iteration_time_s",
        "peak_memory_bytes",
        "budget_bytes",
        "peak_operator",
    )
    return Table(name="kinds", title="Plans by device kind", columns=columns, rows=tuple(rows))


def _without_empty(table: Table) -> Table:
    """The table without columns in which no row has a value."""
    kept = [
        index
        for index in range(len(table.columns))
        if any(row[index] not in (None, "") for row in table.rows)
    ]
    return Table(
        name=table.name,
        title=table.title,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )


def _bucket_table(inputs: ReportInputs) -> Table:
    buckets = inputs.problem.buckets
    rows = [
        (name, index, bucket.size_bytes, code.bits, code.all_reduce_s, code.perturbation)
        for name, plan in inputs.plans.items()
        for index, (bucket, code) in enumerate(
            zip(buckets, chosen(buckets, plan.communication), strict=True)
        )
    ]
    columns = ("plan", "bucket", "gradient_bytes", "bits", "all_reduce_s", "perturbation")
    title = "Bits of gradient buckets, in launch order"
    return Table(name="buckets", title=title, columns=columns, rows=tuple(rows))
