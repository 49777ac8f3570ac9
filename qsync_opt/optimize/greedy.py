"""QSync's greedy recovery: from a fast plan, give back the precision that gains most."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.ladders import Workspace
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind

#: Moves tried between two questions to `should_stop`.
_STOP_EVERY = 64


def greedy_columns(
    problem: AllocationProblem,
    device: DeviceKind,
    deadline_s: float,
    start: IntArray,
    should_stop: Callable[[], bool] | None = None,
    workspace: Workspace | None = None,
) -> IntArray | None:
    """QSync's recovery (arXiv 2407.02327): from a fast plan, raise what gains most, if it fits.

    A heap holds, for every choice, the perturbation gained by raising it from its option to
    the next one (options by falling perturbation). The largest gain is tried by true
    evaluation and kept if deadline and memory hold and the perturbation falls; either way
    the next increment of that choice is pushed. Equal gains come in the order of pushing.

    The published code (bytedance/QSync) reads the gain of a step from the step before, wraps
    round at the first option, and gives a choice up for good once one of its increments is
    refused; here a refused increment is dropped alone, and the option after it is still tried.

    Args:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; infinity for none.
        start: a feasible plan, usually the fastest, [N].
        should_stop: asked now and then; the plan so far is returned once it says True.
        workspace: of this kind, where the caller has one.

    Returns:
        A feasible plan, never worse than `start`; None if `start` is not feasible.
    """
    workspace = workspace or Workspace(problem, device)
    state = workspace.state(start)
    if not state.feasible(deadline_s):
        return None
    ladders = workspace.ladders
    heap: list[tuple[float, int, int, int]] = []
    for number, ladder in enumerate(ladders):
        step = ladder.next_below(state.column_of(ladder.choice.operators[0]), 0)
        if step is not None:
            gain = ladder.gain(state.column_of(ladder.choice.operators[0]), step)
            heap.append((-gain, number, number, step))
    heapify(heap)
    sequence = len(ladders)
    tried = 0
    while heap:
        tried += 1
        if should_stop is not None and tried % _STOP_EVERY == 0 and should_stop():
            break
        _, _, number, step = heappop(heap)
        ladder = ladders[number]
        before = state.perturbation_ticks
        moved = state.move(ladder.choice.operators, ladder.columns[step])
        if state.perturbation_ticks >= before or not state.feasible(deadline_s):
            state.undo(moved)
        now = state.column_of(ladder.choice.operators[0])
        following = ladder.next_below(now, step + 1)
        if following is not None:
            heappush(heap, (-ladder.gain(now, following), sequence, number, following))
            sequence += 1
    return state.columns()
