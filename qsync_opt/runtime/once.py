"""Functions whose gradients cannot be differentiated again, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MESSAGE = b"trying to differentiate twice a layer that is differentiable once; run it in fp32"

#: Torch's node that raises when somebody differentiates through it.
_DelayedError: Any = torch._C._functions.DelayedError


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's `once_differentiable`, but whatever the gradient that is given.

    Torch looks only at whether that gradient is differentiated itself. Behind `sum()` it is not,
    and the second derivatives that go through the saved operands would be left out in silence.
    """
    numbers: Any = once_differentiable(backward)

    @wraps(backward)
    def differentiated(ctx: Any, *gradients: Any) -> Any:
        found = numbers(ctx, *gradients)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        outputs = found if type(found) is tuple else (found,)
        if any(isinstance(out, Tensor) and out.requires_grad for out in outputs):
            return found
        watched = [None if out is None else out.detach().requires_grad_() for out in outputs]
        return _DelayedError(_MESSAGE, len(watched))(*watched)  # of one output no tuple

    return differentiated
