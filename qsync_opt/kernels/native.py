"""The compiled kernels as Python functions: ctypes signatures, and errors from status codes."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch

from qsync_opt.errors import KernelError
from qsync_opt.kernels import build

#: Element types as the launchers number them; keep in step with cuda/common.cuh.
ELEMENTS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}

_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "w": ctypes.POINTER(ctypes.c_int),
}

#: Launcher -> types of its arguments, the stream left out: it is always last.
_SIGNATURES = {
    "quantize_int8": "pipppllliiuu",
    "quantize_fp8": "pipippllliiuu",
    "quantize_fp8_transposed": "pippipplliuu",
    "dequantize": "pippillii",
    "int8_product": "pppppipilllii",
    "int8_product_sm90": "pppppipillliiii",
    "int8_conv_sm90": "pppppipilwi",
    "message_encode": "piliiipuuplil",
    "message_decode": "pliliiipuupi",
    "message_mean": "pliliipfp",
}

#: What launches nothing -> types of its arguments, all of them.
_CALLS = {
    "shared_make": "lpp",
    "shared_free": "p",
    "shared_open": "pp",
    "shared_close": "p",
    "event_make": "pp",
    "event_open": "pp",
    "event_free": "p",
    "event_record": "pp",
    "event_wait": "pp",
}

#: Launcher -> which of its arguments are tensors or None.
_POINTERS = {
    name: tuple(place for place, letter in enumerate(spec) if letter == "p")
    for name, spec in _SIGNATURES.items()
}


@functools.cache
def capability_of(device_index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device; torch looks it up anew every time, for 15 us."""
    return torch.cuda.get_device_capability(device_index)


def stream_of(device_index: int) -> int:
    """Handle of the current stream; torch's own compilers ask for it in this way.

    The public `current_stream` makes an object first, which takes longer than the launch.
    """
    return torch._C._cuda_getCurrentRawStream(device_index)


class Native:
    """One compiled library.

    Args:
        path: the shared library.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._text = self._library.qsync_status_text
        self._text.argtypes, self._text.restype = [ctypes.c_int], ctypes.c_char_p
        self._functions = {
            name: self._bind(name, spec + "p")
            for name, spec in _SIGNATURES.items()
            if hasattr(self._library, f"qsync_{name}")  # some are for Hopper alone
        }
        self._functions |= {name: self._bind(name, spec) for name, spec in _CALLS.items()}

    def _bind(self, name: str, spec: str) -> Any:
        function = getattr(self._library, f"qsync_{name}")
        function.argtypes = [_TYPES[letter] for letter in spec]
        function.restype = ctypes.c_int
        return function

    def call(self, name: str, *arguments: Any) -> None:
        """Call what launches no kernel, with the current device as it is.

        Args:
            name: of the function, without its prefix.
            arguments: numbers, addresses, and what ctypes takes for pointers.

        Raises:
            KernelError: it was refused.
        """
        status = self._functions[name](*arguments)
        if status:
            raise KernelError(name, self._text(status).decode(), "See the driver's own messages.")

    def launch(self, name: str, device: torch.device, *arguments: Any) -> None:
        """Launch on the current stream of a device.

        Args:
            name: of the launcher, without its prefix.
            device: where every tensor of the arguments is.
            arguments: tensors (their data pointers are passed), numbers, None for no tensor.

        Raises:
            KernelError: the launch was refused.
        """
        values = list(arguments)
        for place in _POINTERS[name]:  # asking every argument for its class takes longer
            if values[place] is not None:
                values[place] = values[place].data_ptr()
        function = self._functions[name]
        if device.index == torch.cuda.current_device():
            status = function(*values, stream_of(device.index))
        else:
            with torch.cuda.device(device):
                status = function(*values, stream_of(device.index))
        if status:
            raise KernelError(name, self._text(status).decode(), "See the shapes of the call.")


@functools.cache
def native(device_index: int) -> Native | None:
    """The kernels for a CUDA device, built on the first call; None where they cannot be had.

    Without them the plain torch reference runs, which is slow: a warning says why, once.
    """
    capability = capability_of(device_index)
    if torch.version.hip is not None or capability < build.LEAST_CAPABILITY:
        return None
    try:
        return Native(build.build(build.architecture_of(capability)))
    except (KernelError, OSError) as error:
        message = f"Low-precision kernels run in plain torch, much slower than they could: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
