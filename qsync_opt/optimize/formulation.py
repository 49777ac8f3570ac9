"""`formulate`: the allocation problem as a mixed-integer linear program.

Sets: device kinds r, operators o, precisions p, q, tensors tau with producer u and consumers
V, saved tensors sigma with savers S and storage dtypes s (design, section 4).

Columns, per kind:
    x[o, p]        in {0, 1}: operator o runs at p; members of a group share their columns
    t[tau, v, p, q] in [0, 1]: flow on the edge from u at p to v at q
    z[tau, p, q]   in [0, 1]: the cast p -> q of tau is paid
    k[sigma, s]    in [0, 1]: a copy of sigma is kept in dtype s

Rows, per kind:
    (1) sum_p x[o, p] = 1
    (2) sum_q t[tau, v, p, q] = x[u, p],  sum_p t[tau, v, p, q] = x[v, q],
        z[tau, p, q] >= t[tau, v, p, q]
    (2f) followers f with inputs I, dtype s below fp32:
        x[f, s] <= sum_{p: output(p) = s} x[u, p] for u in I,
        x[f, s] >= sum_{u in I} sum_{p: output(p) = s} x[u, p] - (|I| - 1)
    (3) k[sigma, s] >= sum_{p: storage(p) = s} x[o, p] for o in S
    (4) sum_{sigma live at i} sum_s bytes[sigma, s] k[sigma, s] + sum_p transient[i, p] x[i, p]
        <= memory - fixed, for every point i that can be the peak (`rows.memory_points`)
    (5, 6) optimizer + F + B_k + tail_k <= deadline, for every row of `rows.time_rows`
    (7) length <= deadline, for paths through host and device that the caller gives (`cuts`)

Columns that equal another are not made: where one end of an edge has one option, t is the
other end's x; where one consumer (saver) can ask for a cast (copy), z (k) is its t (x).

Where buckets have codes, all kinds share columns
    b[k, n]        in {0, 1}: bucket k is sent in n bits
with one b of each bucket at 1, the variance of the code as its objective, and tails
    tail_k = sum_{j >= k} sum_n c_j(n) b[j, n],
which makes the program the joint one: its kinds no longer split (`bit_columns`).

Numbers: time rows are multiplied by a power of two that brings the deadline near 1e4, and
allow half of `TIME_TOLERANCE`; rows of bytes are exact to the byte (`byte_rows`). The kinds'
part is in `kind_program`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.bit_columns import BitColumns, add_bits
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.evaluate import allowed_columns
from qsync_opt.optimize.kind_program import KindPart
from qsync_opt.optimize.linear import LinearProgram, ProgramBuilder
from qsync_opt.optimize.problem import AllocationProblem

OBJECTIVES = ("perturbation", "time", "memory")


@dataclass(frozen=True, kw_only=True, eq=False)
class Formulation:
    """A program, and how to read a plan from its solution.

    Attributes:
        program: the mixed-integer program.
        choices: per device kind in it, (index of the kind, x columns [N, P], -1 without one).
        objective_unit: what one unit of the program's objective is worth, in perturbation,
            seconds or bytes.
        sent: the columns b, where buckets have codes.
    """

    program: LinearProgram
    choices: tuple[tuple[int, IntArray], ...]
    objective_unit: float
    sent: BitColumns | None = None

    def read(self, values: FloatArray) -> list[tuple[int, IntArray]]:
        """Per device kind, the precision column of every operator: its largest x, [N]."""
        result = []
        for device, columns in self.choices:
            x = np.where(columns >= 0, values[np.maximum(columns, 0)], -np.inf)
            result.append((device, x.argmax(axis=1)))
        return result

    def read_bits(self, values: FloatArray) -> tuple[int, ...]:
        """The bits of every bucket, [K]; empty where they are no decision."""
        return () if self.sent is None else self.sent.read(values)


def formulate(
    problem: AllocationProblem,
    *,
    deadline_s: float | None = None,
    device: str | None = None,
    objective: str = "perturbation",
    domains: Sequence[BoolArray] | None = None,
    named: bool = True,
    cuts: Sequence[TimeCut] = (),
    bits: Sequence[Sequence[int]] | None = None,
    ordered: bool = False,
) -> Formulation:
    """The program of one device kind, or of all kinds jointly.

    Args:
        problem: the problem.
        deadline_s: iteration time every kind must keep; None leaves time free.
        device: name of one kind; None takes all kinds, weighted as in objective (0).
        objective: `perturbation` (of one kind unweighted, jointly weighted by n_r a_r^2),
            `time` (the kind's iteration time subject to its memory) or `memory` (the kind's
            peak memory subject to the deadline); the last two need `device`.
        domains: per kind in the program, the options left to each operator, [N, P]; by
            default all that pins and groups allow.
        named: whether columns and rows get telling names, or numbers (faster).
        cuts: paths that must be no longer than the iteration time either; of one kind, so
            they need `device`.
        bits: per bucket, the bits left to it; by default all that it has.
        ordered: whether to leave out plans that exchange the bits of like buckets for the worse.

    Raises:
        ParameterError: unknown device or objective, or one kind alone where buckets have
            codes, whose bits all kinds share.
    """
    if objective not in OBJECTIVES:
        raise ParameterError("objective", "must be one of " + ", ".join(OBJECTIVES), objective)
    if device is None:
        picks = range(len(problem.devices))
        if objective != "perturbation":
            raise ParameterError("device", f"must be given for objective {objective!r}", None)
        if cuts:
            raise ParameterError("device", "must be given for cuts", None)
    elif device in problem.device_index:
        picks = range(problem.device_index[device], problem.device_index[device] + 1)
    else:
        known = ", ".join(problem.device_index)
        raise ParameterError("device", f"must be one of {known}", device)
    if device is not None and problem.has_codes:
        refuse_alone(device)
    builder = ProgramBuilder(f"{problem.name}/{device or 'joint'}", named=named)
    sent = add_bits(builder, problem, bits, ordered=ordered) if problem.has_codes else None
    choices, unit = [], 1.0
    for position, index in enumerate(picks):
        kind = problem.devices[index]
        domain = allowed_columns(problem, kind) if domains is None else domains[position]
        weight = problem.weight(kind) if device is None else 1.0
        if objective != "perturbation":
            weight = 0.0
        part = KindPart(problem, kind, domain, builder, weight)
        part.add_time(deadline_s, minimise=objective == "time", cuts=cuts, sent=sent)
        part.add_memory(minimise=objective == "memory")
        unit = part.objective_unit
        choices.append((index, part.x))
    return Formulation(
        program=builder.build(), choices=tuple(choices), objective_unit=unit, sent=sent
    )


def refuse_alone(device: str) -> NoReturn:
    """Refuse one kind of a problem whose buckets have codes.

    Raises:
        ParameterError: always.
    """
    raise ParameterError(
        "device",
        "must be None where buckets have codes: all kinds share their bits",
        device,
        "Fix the bits first: problem.at_bits(plan.communication)",
    )
