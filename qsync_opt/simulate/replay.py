"""`replay`: the timeline of a training step on every rank, by an event recurrence.

Three lanes a rank. The host launches tasks in order, and runs ahead of its device; the device
runs a task when the one before is done and the host has launched it; the network reduces the
buckets in order, each when the slowest rank is ready and the bucket before is done:

    end_i   = max(end_{i-1}, launched_i) + duration_i          (tasks of one rank)
    start_k = max(end_{k-1}, max over ranks of ready_k)        (buckets)

A host that waits for its device in every step starts each with nothing launched. One that does
not runs ahead: where it takes less than a step it comes to be a whole step ahead and limits
nothing, else it sets the pace. So the time from one step to the next settles at the larger of
a step without such hosts and what the slowest of them takes to launch one (in max-plus terms
the largest mean weight of a cycle: nothing leads from a device back to such a host).

While an all-reduce runs, a rank computes `overlap_slowdown` times as slowly. Time is measured
in work done: with W(t) the work that a device could have done by time t, the first line is
solved for all tasks at once as  W(end_i) = D_i + max over j <= i of (W(launched_j) - D_{j-1}),
D the running sum of durations. Where the host takes no time and overlap costs nothing this is
exactly the iteration time of `evaluate` (design, section 4, item 6).

Ranks of one kind do the same at the same time, so each kind is replayed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.evaluate import plan_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.simulate.memory import MemoryTimeline, memory_timeline
from qsync_opt.simulate.tasks import HostCosts, Tasks, Work, device_tasks

#: Steps that are replayed where a host that runs ahead sets the pace; the last is shown.
_STEPS = 4

#: Hosts this close to the slowest count as slowest: sums of floats differ by their order.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class KindReplay:
    """One step of a rank of one device kind; times from the step's own beginning.

    Attributes:
        tasks: what the device runs.
        launched_s: when the host has launched each task, [T]; below 0 where it ran ahead.
        start_s, end_s: of each task on the device, [T].
        ready_s: when each bucket is ready, [K].
        compute_s, cast_s, optimizer_s: device time, stretched by overlap.
        waiting_s: time that ready buckets wait for slower ranks while the network is free.
        host_bound_s: time that the device waits for its host.
        memory: over the step.
    """

    tasks: Tasks
    launched_s: FloatArray
    start_s: FloatArray
    end_s: FloatArray
    ready_s: FloatArray
    compute_s: float
    cast_s: float
    optimizer_s: float
    waiting_s: float
    host_bound_s: float
    memory: MemoryTimeline


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """A predicted training step.

    Attributes:
        iteration_time_s: from one step to the next, once it has settled.
        error: relative error to expect of it, the largest of the kinds that know theirs;
            None if none does.
        reduce_start_s, reduce_end_s: of every bucket's all-reduce, [K].
        communication_s: sum of the all-reduces.
        kinds: device kind -> its part.
    """

    iteration_time_s: float
    error: float | None
    reduce_start_s: FloatArray
    reduce_end_s: FloatArray
    communication_s: float
    kinds: Mapping[str, KindReplay]


def replay(
    problem: AllocationProblem,
    plan: PrecisionPlan,
    *,
    hosts: Mapping[str, HostCosts] | None = None,
) -> Replay:
    """Predict a training step under a plan.

    Args:
        problem: the problem.
        plan: a plan for it.
        hosts: device kind -> what its host takes; kinds left out launch in no time.

    Raises:
        PlanError: the plan is for another problem, or breaks its names.
        ParameterError: host costs of an unknown kind, or of another size.
    """
    hosts = {} if hosts is None else hosts
    for name in hosts:
        if name not in problem.device_index:
            known = ", ".join(problem.device_index)
            raise ParameterError("hosts", f"must name device kinds of the problem ({known})", name)
    columns = plan_columns(problem, plan)
    problem = problem.at_bits(plan.communication)
    lanes = {}
    for device, column in zip(problem.devices, columns, strict=True):
        host = hosts.get(device.name)
        lanes[device.name] = _Lane(device_tasks(problem, device, column, host), host)
    reduce_s = np.array([bucket.all_reduce_s for bucket in problem.buckets], dtype=np.float64)
    starts, ends, pace = _step(lanes, reduce_s, 0.0)
    last = 0.0
    slowest = max((lane.host_s for lane in lanes.values() if not lane.waits), default=0.0)
    if slowest > pace * (1 + _ROUNDING):
        pace, begin = slowest, 0.0
        for lane in lanes.values():
            lane.limits = not lane.waits and lane.host_s >= slowest * (1 - _ROUNDING)
        for _ in range(_STEPS):
            starts, ends, finish = _step(lanes, reduce_s, begin)
            last, begin = begin, finish
    kinds = {}
    for device, column in zip(problem.devices, columns, strict=True):
        lane = lanes[device.name]
        memory = memory_timeline(problem, device, column)
        kinds[device.name] = lane.result(last, starts, ends, memory)
    errors = [host.error for host in hosts.values() if host.error is not None]
    return Replay(
        iteration_time_s=pace,
        error=max(errors, default=None),
        reduce_start_s=starts - last,
        reduce_end_s=ends - last,
        communication_s=float(reduce_s.sum()),
        kinds=MappingProxyType(kinds),
    )


def _step(
    lanes: Mapping[str, _Lane], reduce_s: FloatArray, begin: float
) -> tuple[FloatArray, FloatArray, float]:
    """One step of all ranks from a common beginning: when reductions start and end, and its end."""
    for lane in lanes.values():
        lane.begin(begin)
    starts, ends = np.empty(len(reduce_s)), np.empty(len(reduce_s))
    free = begin
    for k, seconds in enumerate(reduce_s.tolist()):
        ready = max(lane.advance(int(lane.tasks.ready[k])) for lane in lanes.values())
        starts[k] = max(free, ready)
        ends[k] = free = starts[k] + seconds
        for lane in lanes.values():
            lane.overlap(starts[k], free)
    for lane in lanes.values():
        lane.advance(len(lane.tasks.duration_s))
    finish = max(float(lane.end[-1]) for lane in lanes.values())
    return starts, ends, max(finish, float(ends[-1])) if len(ends) else finish


class _Lane:
    """Host and device of one rank, as far as they are known.

    Attributes:
        waits: see `HostCosts`.
        limits: whether the host is one that runs ahead and still is the slowest of all.
        host_s: what the host takes to launch a step.
    """

    def __init__(self, tasks: Tasks, host: HostCosts | None) -> None:
        self.tasks = tasks
        self._rate = 1.0 if host is None else 1.0 / host.overlap_slowdown
        self._before = np.append(0.0, np.cumsum(tasks.duration_s))
        self._launch = np.cumsum(tasks.launch_s)
        self.waits = host is not None and host.waits
        self.limits = False
        self.host_s = float(self._launch[-1]) if len(self._launch) else 0.0
        self._host_free = 0.0
        count = len(tasks.duration_s)
        self.launched, self.start, self.end = np.empty(count), np.empty(count), np.empty(count)

    def begin(self, at: float) -> None:
        """A new step: the device goes on from `at` on."""
        if self.waits:
            self._host_free = at
        elif not self.limits:
            self._host_free = at - self.host_s  # a step ahead, and more makes no difference
        self.launched = self._host_free + self._launch
        self._host_free += self.host_s
        self._done, self._finished = 0, at
        #: Times at which the speed changes, and the work that could be done by then.
        self._times, self._works = [at], [0.0]

    def overlap(self, start: float, end: float) -> None:
        """From now on the device is known to be slower between two times."""
        if end <= start or self._rate == 1.0:
            return
        last, work = self._times[-1], self._works[-1]
        self._times += [start, end]
        done = work + (start - last)
        self._works += [done, done + (end - start) * self._rate]

    def advance(self, until: int) -> float:
        """Run tasks up to a number of them; the time at which the last of them ends."""
        if until > self._done:
            rows = slice(self._done, until)
            offset = self._before[self._done]
            # In work done: W(end_i) = D_i + max(W(finished), max_j<=i W(launched_j) - D_{j-1}).
            launched = self._work(np.maximum(self.launched[rows], self._times[0]))
            lead = np.maximum.accumulate(launched - (self._before[rows] - offset))
            lead = np.maximum(lead, self._work(np.array([self._finished]))[0])
            end = lead + (self._before[self._done + 1 : until + 1] - offset)
            self.start[rows] = self._time(end - self.tasks.duration_s[rows])
            self.end[rows] = self._time(end)
            self._done, self._finished = until, float(self.end[until - 1])
        return self._finished if until == 0 else float(self.end[until - 1])

    def _work(self, times: FloatArray) -> FloatArray:
        past = np.maximum(times - self._times[-1], 0.0)
        result: FloatArray = np.interp(times, self._times, self._works) + past
        return result

    def _time(self, works: FloatArray) -> FloatArray:
        past = np.maximum(works - self._works[-1], 0.0)
        result: FloatArray = np.interp(works, self._works, self._times) + past
        return result

    def result(
        self, begin: float, starts: FloatArray, ends: FloatArray, memory: MemoryTimeline
    ) -> KindReplay:
        """The step just made, from its own beginning."""
        tasks = self.tasks
        ready = np.array([self.end[k - 1] if k else begin for k in tasks.ready.tolist()])
        spent = self.end - self.start
        by_work = np.bincount(tasks.work, weights=spent, minlength=len(Tasks.WORKS))
        of = {work: float(by_work[index]) for index, work in enumerate(Tasks.WORKS)}
        free = np.append(begin, ends[:-1])
        waiting = np.maximum(starts - np.maximum(free, ready), 0.0) if len(starts) else starts
        idle = self.start - np.append(begin, self.end[:-1])
        return KindReplay(
            tasks=tasks,
            launched_s=self.launched - begin,
            start_s=self.start - begin,
            end_s=self.end - begin,
            ready_s=ready - begin,
            compute_s=of[Work.FORWARD] + of[Work.BACKWARD],
            cast_s=of[Work.FORWARD_CAST] + of[Work.BACKWARD_CAST],
            optimizer_s=of[Work.OPTIMIZER],
            waiting_s=float(waiting.sum()),
            host_bound_s=float(np.maximum(idle, 0.0).sum()),
            memory=memory,
        )
