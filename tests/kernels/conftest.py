"""Every test here runs on a GPU; without one, or without its kernels, it is skipped.

Run alone they need only torch and pytest: `pytest --confcutdir=tests/kernels tests/kernels`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from qsync_opt.kernels.native import Native

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> Native:
    from qsync_opt.kernels.native import native

    found = native(device.index)
    if found is None:
        pytest.skip("the kernels cannot be built here")
    return found
