"""Memory of a GPU that several processes use, and events that order their use of it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels.native import Native

#: Length of a handle, by which another process opens what one has made.
HANDLE_BYTES = 64


class SharedMemory:
    """A piece of memory, made by this process or by another one on the same GPU.

    The device must be the current one in every call. What was made is free to go when no
    other process has it open any more.

    Args:
        native: the kernels of the device.
        device: where it lies.
        size_bytes: of all of it.
        handle: of another process; empty: to make a new piece.

    Attributes:
        handle: for other processes.

    Raises:
        KernelError: there is no room, or this process may not open it.
    """

    def __init__(
        self, native: Native, device: torch.device, size_bytes: int, handle: bytes = b""
    ) -> None:
        self._native = native
        self._is_made = not handle
        address = ctypes.c_void_p()
        if handle:
            native.call("shared_open", handle, ctypes.byref(address))
            self.handle = handle
        else:
            told = ctypes.create_string_buffer(HANDLE_BYTES)
            native.call("shared_make", size_bytes, ctypes.byref(address), told)
            self.handle = told.raw
        self._address = address.value or 0
        self._interface = _Bytes(self._address, size_bytes)
        self._device = device

    def tensor(self) -> Tensor:
        """All of it, uint8 [size]; not to be used after `close`."""
        return torch.as_tensor(self._interface, device=self._device)

    def close(self) -> None:
        """Give it back; no stream may use it any more."""
        self._native.call("shared_free" if self._is_made else "shared_close", self._address)


class SharedEvent:
    """A point on a stream of one process that streams of others wait for.

    Args:
        native: the kernels of the device.
        handle: of another process; empty: to make a new event.

    Attributes:
        handle: for other processes.

    Raises:
        KernelError: this process may not open it.
    """

    def __init__(self, native: Native, handle: bytes = b"") -> None:
        self._native = native
        event = ctypes.c_void_p()
        if handle:
            native.call("event_open", handle, ctypes.byref(event))
            self.handle = handle
        else:
            told = ctypes.create_string_buffer(HANDLE_BYTES)
            native.call("event_make", ctypes.byref(event), told)
            self.handle = told.raw
        self._event = event.value or 0

    def record(self, stream: torch.cuda.Stream) -> None:
        """Let it stand for what the stream has been given so far."""
        self._native.call("event_record", self._event, stream.cuda_stream)

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for what it stood for last when this is called, in any process."""
        self._native.call("event_wait", self._event, stream.cuda_stream)

    def close(self) -> None:
        """Give it back."""
        self._native.call("event_free", self._event)


class _Bytes:
    """Memory as torch takes it over without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
