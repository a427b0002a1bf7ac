"""A step's small host arrays on their way to the device: one copy, from pinned memory that is used again.

The life of a buffer:

1. a step's arrays are laid into it one after the other, each at a multiple of ALIGNMENT bytes;
2. one copy is queued, which the host does not wait for, and behind it an event;
3. two steps later it is wanted again: the host waits for that event, which has long passed unless the device is two
   steps behind.

Pinned memory and events need a CUDA device, so tests inject others; on a GPU this has **never run**.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 256  # bytes: as torch aligns, so that kernels are compiled for addresses that are multiples of 16
IN_FLIGHT = 2  # steps whose copies may not have happened yet


class Event(Protocol):
    """As `torch.cuda.Event`."""

    def record(self) -> None:
        """Marks what is queued on the current stream by now."""

    def synchronize(self) -> None:
        """Waits for what was marked; not at all where nothing was."""


@dataclass(slots=True)
class _Buffer:
    host: torch.Tensor  # uint8
    copied: Event


class Staging:
    """Takes arrays to one device. Not for several threads at once."""

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int], torch.Tensor] | None = None,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        """`allocate` returns so many bytes of host memory, uint8; pinned unless given."""
        self._device = device
        self._allocate = allocate or _pinned
        self._make_event = make_event
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def to_device(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device, in their order, types and shapes: copied on the current stream, in one piece."""
        starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
        buffer = self._next(starts[-1])
        host = buffer.host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        there.copy_(buffer.host[: starts[-1]], non_blocking=True)
        buffer.copied.record()
        return [
            there[start : start + array.nbytes].view(_TYPES[array.dtype.str]).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]

    def _next(self, num_bytes: int) -> _Buffer:
        """A buffer that no copy reads any more, with room."""
        if len(self._buffers) < IN_FLIGHT:
            self._buffers.append(_Buffer(self._allocate(_rounded(num_bytes)), self._make_event()))
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        buffer.copied.synchronize()
        if len(buffer.host) < num_bytes:
            buffer.host = self._allocate(_rounded(num_bytes))
        return buffer


_TYPES = {"<i4": torch.int32, "<i8": torch.int64}


def _rounded(num_bytes: int) -> int:
    """Room to grow into: the next power of two, at least 64 KiB."""
    return max(1 << 16, 1 << (num_bytes - 1).bit_length())


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
