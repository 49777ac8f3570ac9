"""Which precisions pins, groups and followers leave to every operator, found without a solver.

For one device kind, every operator o has a domain: the precisions it may still take. Three
sorts of rule cut it down:

    pin         o runs at the pinned precision;
    group       its members share one precision;
    follower    f runs at the promotion of what its inputs hand on (equal dtypes stay,
                unequal ones give fp32).

`Network.propagate` removes every precision that no single rule can support (generalised arc
consistency). That proves most contradictions at once but not all: a follower whose inputs
are tied to each other by a group can be consistent rule by rule and still have no
assignment. `Network.assign` therefore searches, propagating after every decision; on real
graphs it never has to go back. `find_conflict` reduces a contradiction to rules of which none
can be left out (QuickXplain: Junker, AAAI 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.precision import HANDED_ON, PROMOTED

#: Decisions taken back before a search gives up. Propagation settles real graphs without any.
_MOST_RETREATS = 2_000


class RuleSort(str, Enum):
    """What kind of rule binds the precisions of operators."""

    PIN = "pin"
    GROUP = "group"
    FOLLOWER = "follower"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule over the domains of a device kind.

    Attributes:
        sort: pin, group or follower.
        scope: the operators it binds; for a follower, itself and then its inputs.
        column: the precision column of a pin, else -1.
    """

    sort: RuleSort
    scope: tuple[int, ...]
    column: int = -1

    def describe(self, problem: AllocationProblem) -> str:
        """The rule in words, for messages."""
        names = [problem.operators[index].name for index in self.scope]
        if self.sort is RuleSort.PIN:
            return f"pin {names[0]} = {problem.precisions[self.column].value}"
        if self.sort is RuleSort.GROUP:
            return "group " + ", ".join(names)
        return f"{names[0]} follows " + ", ".join(names[1:])


def rules_of(problem: AllocationProblem, device: DeviceKind) -> tuple[Rule, ...]:
    """Every rule of one device kind: pins by operator, then groups, then followers."""
    index, columns = problem.operator_index, problem.precisions
    pins = sorted((index[name], columns.index(value)) for name, value in device.pins.items())
    rules = [Rule(RuleSort.PIN, (row,), column) for row, column in pins]
    for group in problem.groups:
        rules.append(Rule(RuleSort.GROUP, tuple(index[name] for name in group)))
    for row, operator in enumerate(problem.operators):
        if operator.follows:
            rules.append(Rule(RuleSort.FOLLOWER, (row, *operator.follows)))
    return tuple(rules)


class SearchLimitError(Exception):
    """The search gave up; whether an assignment exists is not known."""


class Network:
    """The domains of one device kind under a set of rules; domains are bit masks of columns."""

    def __init__(
        self, problem: AllocationProblem, device: DeviceKind, rules: Sequence[Rule]
    ) -> None:
        self._rules = tuple(rules)
        bits = 1 << np.arange(len(problem.precisions))
        self.domains: list[int] = (device.available @ bits).tolist()
        self._follower = [bool(operator.follows) for operator in problem.operators]
        self._touching: dict[int, list[int]] = {}
        for number, rule in enumerate(self._rules):
            for row in rule.scope:
                self._touching.setdefault(row, []).append(number)
        # Dtypes are bit masks over HANDED_ON. What a domain can hand on, and its inverse:
        code = [1 << HANDED_ON.index(dtype) for dtype in problem.output]
        masks = range(1 << len(problem.precisions))
        self._handed = [_union(code[c] for c in _members(mask)) for mask in masks]
        dtypes = range(1 << len(HANDED_ON))
        self._handing = [
            _union(1 << c for c, own in enumerate(code) if own & mask) for mask in dtypes
        ]
        # A follower asked for a dtype runs at the precision of that name.
        column = {HANDED_ON.index(p): c for c, p in enumerate(problem.precisions) if p in HANDED_ON}
        self._running = [
            _union(1 << column[d] for d in _members(mask) if d in column) for mask in dtypes
        ]
        self._asked = [_union(1 << d for d, c in column.items() if mask >> c & 1) for mask in masks]
        self._promoted = 1 << HANDED_ON.index(PROMOTED)
        self._trail: list[tuple[int, int]] = []
        #: Operator whose domain was emptied by the last failed `propagate`.
        self.emptied: int | None = None
        #: Per operator, the numbers of the rules that cut its domain down.
        self.cut_by: dict[int, set[int]] = {}

    def allowed(self) -> BoolArray:
        """The domains as a table, [N, P]."""
        columns = max(len(self._handed).bit_length() - 1, 1)
        masks = np.array(self.domains, dtype=np.int64)
        return (masks[:, None] >> np.arange(columns) & 1).astype(np.bool_)

    def propagate(self, start: Iterable[int] | None = None) -> bool:
        """Cut domains until every rule supports what is left; False if one became empty.

        Args:
            start: numbers of the rules to begin with; all by default.
        """
        queue = list(range(len(self._rules))) if start is None else list(start)
        queued = set(queue)
        while queue:
            number = queue.pop()
            queued.discard(number)
            for row, mask in self._revise(self._rules[number]):
                kept = self.domains[row] & mask
                if kept == self.domains[row]:
                    continue
                self._trail.append((row, self.domains[row]))
                self.domains[row] = kept
                self.cut_by.setdefault(row, set()).add(number)
                if not kept:
                    self.emptied = row
                    return False
                for other in self._touching.get(row, ()):
                    if other not in queued:
                        queued.add(other)
                        queue.append(other)
        return True

    def _revise(self, rule: Rule) -> list[tuple[int, int]]:
        """Per operator of the rule, the columns that the rule supports."""
        domains = self.domains
        if rule.sort is RuleSort.PIN:
            return [(rule.scope[0], 1 << rule.column)]
        if rule.sort is RuleSort.GROUP:
            shared = -1
            for row in rule.scope:
                shared &= domains[row]
            return [(row, shared) for row in rule.scope]
        follower, inputs = rule.scope[0], rule.scope[1:]
        handed = [self._handed[domains[row]] for row in inputs]
        common, seen = -1, 0
        for dtypes in handed:
            common &= dtypes
            seen |= dtypes
        mixed = len(inputs) > 1 and seen & (seen - 1) != 0
        possible = common | (self._promoted if mixed else 0)
        kept = domains[follower] & self._running[possible]
        result = [(follower, kept)]
        asked = self._asked[kept]
        for position, row in enumerate(inputs):
            others = handed[:position] + handed[position + 1 :]
            supported = 0
            for dtype in _members(handed[position]):
                bit = 1 << dtype
                equal = asked & bit and all(other & bit for other in others)
                unequal = asked & self._promoted and any(other & ~bit for other in others)
                if equal or unequal:
                    supported |= bit
            result.append((row, self._handing[supported]))
        return result

    def _undo(self, length: int) -> None:
        while len(self._trail) > length:
            row, mask = self._trail.pop()
            self.domains[row] = mask

    def assign(self, preference: FloatArray) -> IntArray | None:
        """An assignment that obeys every rule, the preferred column first; None if there is none.

        Args:
            preference: lower is tried first, [N, P]; ties go to the lower column.

        Returns:
            The precision column of every operator, [N]. Domains are left as they were.

        Raises:
            SearchLimitError: given up; an assignment may or may not exist.
        """
        mark = len(self._trail)
        try:
            return self._search(np.argsort(preference, axis=1, kind="stable").tolist())
        finally:
            self._undo(mark)

    def _search(self, order: list[list[int]]) -> IntArray | None:
        if not self.propagate():
            return None
        # Followers come last: once their inputs are settled they have no choice.
        rows = sorted(range(len(self.domains)), key=lambda row: self._follower[row])
        # Per decision: its position in `rows`, the trail before it, the columns still untried.
        stack: list[tuple[int, int, list[int]]] = []
        position, retreats = 0, 0
        untried: list[int] | None = None
        while position < len(rows):
            row = rows[position]
            if untried is None:
                domain = self.domains[row]
                if domain & (domain - 1) == 0:
                    position += 1
                    continue
                untried = [column for column in order[row] if domain >> column & 1]
            if untried:
                column, mark = untried[0], len(self._trail)
                stack.append((position, mark, untried[1:]))
                self._trail.append((row, self.domains[row]))
                self.domains[row] = 1 << column
                if self.propagate(self._touching.get(row, ())):
                    position, untried = position + 1, None
                    continue
            if not stack:
                return None
            retreats += 1
            if retreats > _MOST_RETREATS:
                raise SearchLimitError
            position, mark, untried = stack.pop()
            self._undo(mark)
        return np.array([mask.bit_length() - 1 for mask in self.domains], dtype=np.int64)


def _members(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _union(masks: Iterable[int]) -> int:
    result = 0
    for mask in masks:
        result |= mask
    return result


def find_conflict(
    problem: AllocationProblem, device: DeviceKind, rules: Sequence[Rule] | None = None
) -> tuple[Rule, ...]:
    """Rules that contradict each other, none of which can be left out; empty if none do.

    Args:
        problem: the problem.
        device: one of its device kinds.
        rules: the rules to look at; every rule of the kind by default.

    Raises:
        SearchLimitError: whether the rules contradict each other is not known.
    """
    rules = rules_of(problem, device) if rules is None else tuple(rules)
    flat = np.zeros(device.available.shape)
    network = Network(problem, device, rules)
    if network.propagate():
        if network.assign(flat) is not None:
            return ()
        suspects = list(rules)
    else:
        suspects = [rules[number] for number in sorted(_slice(network, rules))]

    def contradicts(subset: Sequence[Rule]) -> bool:
        try:
            return Network(problem, device, subset).assign(flat) is None
        except SearchLimitError:
            return False  # not proven, so the rule under test stays in the conflict

    return tuple(sorted(_quick_explain([], False, suspects, contradicts), key=rules.index))


def rules_to_drop(problem: AllocationProblem, device: DeviceKind) -> tuple[Rule, ...]:
    """Pins (groups, where no pin is involved) without which the others can hold together.

    From each conflict the pin of the latest operator goes: a pin on a follower contradicts
    what decides it.

    Raises:
        SearchLimitError: not known.
    """
    rules = list(rules_of(problem, device))
    dropped: list[Rule] = []
    while conflict := find_conflict(problem, device, rules):
        pins = [rule for rule in conflict if rule.sort is RuleSort.PIN]
        groups = [rule for rule in conflict if rule.sort is RuleSort.GROUP]
        # Validation gives followers what their inputs hand on, so pins or groups take part.
        worst = max(pins or groups, key=lambda rule: rule.scope)
        rules.remove(worst)
        dropped.append(worst)
    return tuple(dropped)


def _quick_explain(
    background: list[Rule],
    changed: bool,
    candidates: list[Rule],
    contradicts: Callable[[Sequence[Rule]], bool],
) -> list[Rule]:
    """The rules of `candidates` that a contradiction with `background` cannot do without."""
    if changed and contradicts(background):
        return []
    if len(candidates) == 1:
        return candidates
    half = len(candidates) // 2
    first, second = candidates[:half], candidates[half:]
    needed = _quick_explain(background + first, True, second, contradicts)
    return needed + _quick_explain(background + needed, bool(needed), first, contradicts)


def _slice(network: Network, rules: Sequence[Rule]) -> set[int]:
    """Numbers of the rules that had a part in emptying the domain."""
    waiting = [] if network.emptied is None else [network.emptied]
    found: set[int] = set()
    seen = set(waiting)
    while waiting:
        for number in network.cut_by.get(waiting.pop(), ()):
            found.add(number)
            for row in rules[number].scope:
                if row not in seen:
                    seen.add(row)
                    waiting.append(row)
    return found
