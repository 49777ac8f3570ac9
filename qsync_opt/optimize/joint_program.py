"""The joint program over some options, for a back end, and how its solutions are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.joint_core import OpenOptions
from qsync_opt.optimize.joint_incumbent import JointIncumbent
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proposals import Program


@dataclass(frozen=True, kw_only=True)
class Domains:
    """What is left to decide.

    Attributes:
        operators: options of every operator, [N, P] per distinct kind.
        codes: which codes of every bucket, [K] arrays.
    """

    operators: list[BoolArray]
    codes: list[BoolArray]


def open_domains(joint: JointLagrangian, least: OpenOptions, threshold: float) -> Domains:
    """The options and codes whose bounds are below a threshold."""
    parts = zip(joint.parts, least.kinds, strict=True)
    return Domains(
        operators=[part.graph.operator_options(bounds < threshold) for part, bounds in parts],
        codes=[bounds < threshold for bounds in least.codes],
    )


def joint_program(
    problem: AllocationProblem, incumbent: JointIncumbent, open_: Domains | None
) -> Program:
    """The program of all kinds and buckets over what is left; over everything for None.

    Where something was ruled out already, of plans that exchange the bits of like buckets only
    the best is left too.
    """
    domains = bits = None
    if open_ is not None:
        domains = [np.zeros(0, dtype=np.bool_)] * len(problem.devices)
        for mine, members in zip(open_.operators, incumbent.kinds, strict=True):
            for index in members:
                domains[index] = mine
        bits = [
            [code.bits for code, is_open in zip(bucket.choices, codes, strict=True) if is_open]
            for bucket, codes in zip(problem.buckets, open_.codes, strict=True)
        ]
    built = formulate(
        problem,
        deadline_s=incumbent.deadline_s,
        domains=domains,
        bits=bits,
        ordered=open_ is not None,
        named=False,
    )

    def read(values: FloatArray) -> tuple[IntArray, IntArray]:
        columns = [column for _, column in built.read(values)]
        picked = [
            x[np.arange(len(column)), column]
            for (_, x), column in zip(built.choices, columns, strict=True)
        ]
        wanted = built.read_bits(values)
        if built.sent is not None:
            sent = zip(built.sent.columns, built.sent.bits, wanted, strict=True)
            picked.append(np.array([at[left.index(count)] for at, left, count in sent]))
        return incumbent.flat(columns, wanted), np.unique(np.concatenate(picked))

    return Program(program=built.program, read=read, unit=1.0, constant=0.0)
