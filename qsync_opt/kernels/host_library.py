"""Layers in float precisions as torch operators in C++, from `cuda/layers.cpp`.

Launching a layer and its gradients takes about half of the host's time that the same functions
take in Python, which run where there is no compiler.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from qsync_opt.errors import KernelError
from qsync_opt.kernels import build


@dataclass(frozen=True)
class CompiledLayers:
    """The operators; what they compute say `FloatLinear` and `FloatConv2d` of the runtime.

    Attributes:
        linear: x, weight, bias or None, and x in the dtype of the product (None: x has it).
        conv2d: the same, then stride, padding, dilation and groups.
    """

    linear: Any
    conv2d: Any


@functools.cache
def compiled_layers() -> CompiledLayers | None:
    """The operators, built on the first call; None where they cannot be had.

    Without them the same functions run in Python: a warning says why, once.
    """
    load: Any = torch.ops.load_library  # torch leaves it without annotations
    try:
        path = build.build_layers()
        try:
            load(str(path))
        except OSError:  # of another machine, or not whole: once more
            path.unlink()
            load(str(build.build_layers()))
    except (KernelError, OSError) as error:
        message = f"Layers launch from Python, slower than they could: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    found = torch.ops.qsync_opt
    return CompiledLayers(found.float_linear.default, found.float_conv2d.default)
