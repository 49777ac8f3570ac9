"""From a plan to the bits that its job sends each bucket of gradients at."""

from __future__ import annotations

from qsync_opt.errors import ParameterError
from qsync_opt.graph import OperatorGraph
from qsync_opt.optimize.buckets import chosen
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import FULL_BITS, PrecisionPlan
from qsync_opt.runtime.bucket_bits import PlannedBits
from qsync_opt.runtime.communication import communication_at
from qsync_opt.runtime.parameters import TrainParameters

_FLOAT_BYTES = 4


def bits_of_job(
    plan: PrecisionPlan | None,
    problem: AllocationProblem | None,
    graph: OperatorGraph | None,
    parameters: TrainParameters,
) -> PlannedBits | None:
    """The bits of a job's plan; None where all buckets are sent alike.

    They are wanted where the plan has some, and where a refined one may get some.

    Args:
        plan: in use.
        problem: of the plan.
        graph: that the plan was made for.
        parameters: of the job; with `uniform` or `autocast` the plan is not in use.

    Raises:
        ParameterError: `communication` is given too, the problem or the graph is missing,
            which say what is in a bucket, or nothing is sent at so many bits, of this plan or of
            a refined one.
        PlanError: another number of buckets, or bits that a bucket of the problem does not have.
    """
    if plan is None or parameters.uniform is not None or parameters.autocast is not None:
        return None
    has_bits = bool(plan.communication)
    may_get_some = problem is not None and problem.has_codes and graph is not None
    if parameters.communication is not None:
        if has_bits or (may_get_some and parameters.refine_interval):
            rule = "must not be given with a plan that has bits for buckets"
            remedy = "Leave it out, or solve a problem that was built without bits"
            raise ParameterError("communication", rule, parameters.communication, remedy)
        return None
    if not has_bits and not may_get_some:
        return None
    if problem is None or graph is None:
        name = "problem" if problem is None else "graph"
        rule = "must be given with a plan that has bits for buckets"
        raise ParameterError(name, rule, None, "It says what the buckets hold")
    if parameters.refine_interval:
        _require_sendable(problem)
    return planned_bits(plan, problem, graph)


def _require_sendable(problem: AllocationProblem) -> None:
    """Refuse bits that a plan found while training runs could not be sent at."""
    for index, bucket in enumerate(problem.buckets):
        for code in bucket.codes:
            try:
                communication_at(code.bits)
            except ParameterError as error:
                remedy = "Build the problem without these bits, or train without refinement"
                where = f"problem.buckets[{index}].codes"
                raise ParameterError(where, error.rule, code.bits, remedy) from None


def planned_bits(
    plan: PrecisionPlan, problem: AllocationProblem, graph: OperatorGraph
) -> PlannedBits:
    """The bits of every bucket of a plan's problem, and which parameters they are for.

    Raises:
        ParameterError: nothing is sent at so many bits.
        PlanError: another number of buckets, or bits that a bucket of the problem does not have.
    """
    chosen(problem.buckets, plan.communication)  # raises
    sizes = tuple(bucket.size_bytes for bucket in problem.buckets)
    whole = PlannedBits(
        bits=(FULL_BITS,) * len(sizes), size_bytes=sizes, bucket_of=_bucket_of(problem, graph)
    )
    return whole.at(plan.communication)


def _bucket_of(problem: AllocationProblem, graph: OperatorGraph) -> dict[str, int]:
    """Name of every trained parameter -> the problem's bucket that its gradient is in.

    An operator has the first bucket that waits for it (`build`). The last ones of a bucket may
    have parameters in the next one: those that came when it was full.
    """
    first = {operator.name: operator.bucket for operator in problem.operators}
    operator_of = {
        index: operator.name
        for operator, indices in zip(graph.operators, graph.completes, strict=True)
        for index in indices
    }
    left = [bucket.size_bytes for bucket in problem.buckets]
    found = {}
    for index in graph.gradient_order:
        bucket = first.get(operator_of[index])
        if bucket is None:
            continue
        parameter = graph.parameters[index]
        size_bytes = _FLOAT_BYTES * parameter.elements
        if size_bytes > left[bucket] and bucket + 1 < len(left):
            bucket += 1
        left[bucket] -= size_bytes
        for name in (parameter.name, *parameter.aliases):
            found[name] = bucket
    return found
