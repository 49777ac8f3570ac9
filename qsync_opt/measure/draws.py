"""`SameDraws`: random calls, such as dropout, that draw alike in every precision.

A GPU draws other random numbers for a 16-bit tensor than for a float32 one from the same state of
its generator. Where two precisions are compared, a difference of dropout masks would pass for
rounding and be larger than all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qsync_opt.measure.calls import encode_arguments, replace_tensors, tensors_in

_LOW = (torch.bfloat16, torch.float16)


def random_state(device: torch.device) -> Tensor:
    """The state of a device's generator."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class SameDraws(TorchFunctionMode):
    """Within it a call that draws random numbers and gets 16-bit tensors runs in float32.

    Its operands are cast up and what it returns, or writes into, is cast back, so that only
    operands and results are rounded. Whether a call draws is found by making it once on copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[Any, str], bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a call."""
        named = kwargs or {}
        given = [x for x in tensors_in((args, named)) if x.dtype in _LOW]
        if not given or not self._draws(func, args, named, given[0].device):
            return func(*args, **named)
        pairs: list[tuple[Tensor, Tensor]] = []

        def widen(x: Tensor) -> Tensor:
            if x.dtype not in _LOW:
                return x
            pairs.append((x, x.float()))
            return pairs[-1][1]

        wide_args, wide_named = replace_tensors((args, named), widen)
        result = func(*wide_args, **wide_named)
        for own, wide in pairs:
            if wide._version:
                own.copy_(wide)

        def narrow(x: Tensor) -> Tensor:
            own = next((own for own, wide in pairs if wide is x), None)
            if own is not None:
                return own
            return x.to(given[0].dtype) if x.dtype is torch.float32 else x

        return replace_tensors(result, narrow)

    def _draws(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> bool:
        try:
            key = func, encode_arguments(args, kwargs)
        except (TypeError, ValueError):
            return False  # takes what no function of torch that draws does
        if key not in self._known:
            state = random_state(device)
            copies = replace_tensors((args, kwargs), _wide_copy)
            try:
                with torch.no_grad():
                    func(*copies[0], **copies[1])
                self._known[key] = not torch.equal(random_state(device), state)
            except RuntimeError:  # cannot run apart from its step, as derivatives cannot
                self._known[key] = False
            set_random_state(device, state)
        return self._known[key]


def _wide_copy(x: Tensor) -> Tensor:
    return x.detach().float() if x.dtype in _LOW else x.detach().clone()
