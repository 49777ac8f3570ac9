"""`Ladder`: the options of one choice by falling perturbation; `Workspace`: made once a kind."""

from __future__ import annotations

from dataclasses import dataclass

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.choices import Choice, equal_cost, movable
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.state import PlanState


@dataclass(frozen=True)
class Ladder:
    """The options of a choice by falling perturbation, then rising time, then column.

    Attributes:
        choice: the choice.
        columns: its columns in that order.
        perturbation: of the whole choice, by column.
        time_s: forward and backward of the whole choice, casts left out, by column.
    """

    choice: Choice
    columns: tuple[int, ...]
    perturbation: dict[int, float]
    time_s: dict[int, float]

    def gain(self, column: int, step: int) -> float:
        """Perturbation gained by going from a column to a step of the ladder."""
        return self.perturbation[column] - self.perturbation[self.columns[step]]

    def next_below(self, column: int, step: int) -> int | None:
        """The first step from `step` on that perturbs less than a column; None without one."""
        now = self.perturbation[column]
        for index in range(step, len(self.columns)):
            other = self.perturbation[self.columns[index]]
            if other < now and not equal_cost(other, now):
                return index
        return None


def make_ladders(problem: AllocationProblem, device: DeviceKind) -> list[Ladder]:
    """The ladder of every choice with more than one option, by first operator."""
    perturbations = device.perturbation.tolist()
    totals_s = (device.forward_s + device.backward_s).tolist()
    result = []
    for choice in movable(problem, device):
        if len(choice.columns) == 1:
            continue
        perturbation = choice.summed(perturbations)
        time_s = choice.summed(totals_s)
        order = sorted(choice.columns, key=lambda q: (-perturbation[q], time_s[q], q))  # noqa: B023
        result.append(
            Ladder(
                choice=choice,
                columns=tuple(order),
                perturbation={q: perturbation[q] for q in order},
                time_s={q: time_s[q] for q in order},
            )
        )
    return result


class Workspace:
    """What the searches by moves share on one device kind: its ladders and one state.

    Args:
        problem: the problem.
        device: one of its device kinds.
    """

    def __init__(self, problem: AllocationProblem, device: DeviceKind) -> None:
        self._problem, self._device = problem, device
        self._ladders: list[Ladder] | None = None
        self._state: PlanState | None = None

    @property
    def ladders(self) -> list[Ladder]:
        """The ladder of every choice that has one, by first operator."""
        if self._ladders is None:
            self._ladders = make_ladders(self._problem, self._device)
        return self._ladders

    def state(self, column: IntArray) -> PlanState:
        """The state, with a plan, [N], taken up; any earlier one is gone."""
        if self._state is None:
            self._state = PlanState(self._problem, self._device, column)
        else:
            self._state.load(column)
        return self._state
