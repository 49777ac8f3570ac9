"""Random hosts for the random tiny problems: some run ahead, some wait, some are slow."""

from __future__ import annotations

import numpy as np

from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.simulate.tasks import HostCosts


def random_hosts(
    problem: AllocationProblem, seed: int, *, slowdowns: tuple[float, ...] = (1.0, 1.0, 1.3, 2.0)
) -> dict[str, HostCosts]:
    """A host for every kind, of about the speed of its device; equal for equal seeds."""
    rng = np.random.default_rng([seed, 7])
    hosts = {}
    for device in problem.devices:
        times = device.forward_s + device.backward_s
        typical = max(float(times[device.available].mean()) / 2, 1e-9) * rng.choice([0.3, 1.0, 2.0])
        shape = device.forward_s.shape
        hosts[device.name] = HostCosts(
            forward_s=rng.uniform(0, 2 * typical, size=shape),
            backward_s=rng.uniform(0, 2 * typical, size=shape),
            optimizer_s=float(rng.uniform(0, typical)),
            overlap_slowdown=float(rng.choice(slowdowns)),
            waits=bool(rng.random() < 0.5),
        )
    return hosts
