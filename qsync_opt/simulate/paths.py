"""`KindPaths`: the replayed iteration time of one device kind as the longest of a few paths.

The event recurrence of `replay` is a longest path (max-plus), so that "the replayed time is at
most D" is, kind by kind, a set of inequalities that are linear in the plan. With c_k the
all-reduce of bucket k, s the overlap slowdown, w_k the device's work until bucket k is ready,
D_i the device's work and L_i the host's before and with task i:

*Overlap.* The step ends by D if and only if, for every kind and bucket,

    w_k + (1 - 1/s) sum_{j<k} c_j + sum_{j>=k} c_j <= D,    w + (1 - 1/s) sum_j c_j <= D

(w all work of the step). Needed: bucket k is reduced by D only if that begins at
S_k = D - sum_{j>=k} c_j or sooner; all reductions before it lie before that, and while they
ran the device did 1/s of its work, so by then it has done at most
S_k - (1 - 1/s) sum_{j<k} c_j. Enough: if reductions before k are over by S_k (induction) and
bucket k were not ready by then, exactly that much work would have been done by S_k, which is
w_k or more: a contradiction. So overlap only lengthens the rows of `rows.time_rows`.

*A host that runs ahead* is never waited for by the device once its lead has settled, unless
it takes longer than the step: L_T <= D, one more row (see `replay`).

*A host that waits* launches from the beginning of the step: task i runs after L_i, then the
rest of the device's work up to the bucket:

    L_i + (D_e - D_{i-1}) + sum_{j>=k} c_j <= D    for every task i up to the bucket's last, e.

Each left side is a sum over operators (host part for those up to i, device part from i on) and
over the casts from i on: `TimeCut`. No plan whose step ends by D breaks one, because the end of
the step is no earlier than the end of any path; and the longest path of a plan is its time. The
last sentence fails in one case only: where overlap slows a device whose host waits, a reduction
may or may not fall into the part of the path that is the device's. The rows above leave the
slowdown out there (still needed); with `worst` they count all of (1 - 1/s) sum_{j<k} c_j, as if
every reduction ran as late as it may, which is enough for the deadline but not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.evaluate import first_operators, tails_s
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.simulate.tasks import HostCosts, Tasks, Work, device_tasks

_BACKWARD = Tasks.WORKS.index(Work.BACKWARD)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPath:
    """A path that begins on the host.

    Attributes:
        time_s: its length: the iteration time is no shorter.
        start: the task at which it changes over to the device; -1 if it stays on the host.
        bucket: the bucket whose reduction ends it; -1 if computing does.
    """

    time_s: float
    start: int
    bucket: int


class KindPaths:
    """The paths of one device kind.

    Args:
        problem: the problem.
        device: one of its kinds.
        host: what launching costs there; None where it costs nothing.
        worst: see the module; only where overlap slows a device whose host waits.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        host: HostCosts | None,
        *,
        worst: bool = False,
    ) -> None:
        self._problem, self._device, self._host = problem, device, host
        reduce_s = np.array([b.all_reduce_s for b in problem.buckets], dtype=np.float64)
        slowed = 0.0 if host is None else 1.0 - 1.0 / host.overlap_slowdown
        before = np.append(0.0, np.cumsum(reduce_s)) * slowed
        # One entry per bucket, and one for the end of computing.
        self._first = np.append(first_operators(problem), 0)
        self._tail = np.append(tails_s(problem), 0.0)
        self._overlap = before
        self._host_tail = self._tail + (before if worst else 0.0)

    def device_time_s(self, column: IntArray) -> float:
        """The longest path on the device alone; `column` is the plan, [N]."""
        tasks = device_tasks(self._problem, self._device, column, self._host)
        done = np.append(0.0, np.cumsum(tasks.duration_s))
        return float((done[self._ends(tasks)] + self._tail + self._overlap).max())

    def time_s(self, column: IntArray) -> float:
        """The iteration time if no other kind were slower; see the module for `worst`."""
        paths = [path.time_s for path in self.host_paths(column)]
        return max(self.device_time_s(column), max(paths, default=0.0))

    def host_paths(self, column: IntArray) -> list[HostPath]:
        """The longest path from the host to every end, the longest first."""
        if self._host is None:
            return []
        tasks = device_tasks(self._problem, self._device, column, self._host)
        launched = np.cumsum(tasks.launch_s)
        if not self._host.waits:
            return [HostPath(time_s=float(launched[-1]), start=-1, bucket=-1)]
        done = np.append(0.0, np.cumsum(tasks.duration_s))
        lead = launched - done[:-1]
        found = []
        for bucket, end in enumerate(self._ends(tasks).tolist()):
            start = int(lead[:end].argmax())
            length = float(lead[start] + done[end] + self._host_tail[bucket])
            bucket = bucket if bucket < len(self._problem.buckets) else -1
            found.append(HostPath(time_s=length, start=start, bucket=bucket))
        return sorted(found, key=lambda path: (-path.time_s, path.bucket))

    def cut(self, column: IntArray, path: HostPath) -> TimeCut:
        """A path of a plan as a row that holds for all plans; the plan's own value is its length.

        A task at which a path changes over is never a cast: casts are launched together with
        the task before them, from which the path would be longer.

        Raises:
            ParameterError: a path of a kind without a host.
        """
        problem, device, host = self._problem, self._device, self._host
        if host is None:
            raise ParameterError("path", "must be of this kind, which has no host", path)
        count = len(problem.operators)
        operators = np.arange(count)[:, None]
        if path.start < 0:
            return TimeCut(
                name="host",
                operator_s=host.forward_s + host.backward_s,
                past_s=host.optimizer_s,
                forward_casts_from=count,
                backward_casts=(0, 0),
            )
        tasks = device_tasks(problem, device, column, host)
        first = int(self._first[path.bucket])
        work, at = Tasks.WORKS[tasks.work[path.start]], int(tasks.operator[path.start])
        device_forward = np.zeros((count, 1), dtype=np.bool_)
        device_backward = operators >= first
        host_forward = np.ones((count, 1), dtype=np.bool_)
        host_backward = np.zeros((count, 1), dtype=np.bool_)
        past_s = host.optimizer_s + float(self._host_tail[path.bucket])
        casts_from, producers_below = count, count
        if work is Work.OPTIMIZER:
            past_s += device.optimizer_s
            host_forward = host_backward
            device_forward = operators >= 0
            casts_from = 0
        elif work is Work.FORWARD:
            host_forward, device_forward = operators <= at, operators >= at
            casts_from = at + 1
        else:
            host_backward = operators >= at
            device_backward = device_backward & (operators <= at)
            producers_below = at
        return TimeCut(
            name=f"{work} {at} to {'compute' if path.bucket < 0 else f'bucket {path.bucket}'}",
            operator_s=_of(host_forward, host.forward_s)
            + _of(host_backward, host.backward_s)
            + _of(device_forward, device.forward_s)
            + _of(device_backward, device.backward_s),
            past_s=past_s,
            forward_casts_from=casts_from,
            backward_casts=(first, producers_below),
        )

    def _ends(self, tasks: Tasks) -> IntArray:
        return np.append(tasks.ready, len(tasks.duration_s))


def _of(which: np.ndarray, table: FloatArray) -> FloatArray:
    result: FloatArray = np.where(which, table, 0.0)
    return result


def violated(paths: list[HostPath], deadline_s: float) -> Iterator[HostPath]:
    """The paths that are longer than a deadline."""
    return (path for path in paths if path.time_s > deadline_s)
