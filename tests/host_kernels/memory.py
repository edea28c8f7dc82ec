"""Blocks of bytes that kernels work on, and what lies where inside them.

All that a kernel may read or write, its pointer table too, lies in one block. So it is
moved to where the kernel runs, and back, as a whole, and whatever is written outside
of the arrays shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np

#: Bytes around every array that no kernel may touch, and what is in them.
GUARD_BYTES = 64
GUARD = 0xA5
#: The address of a block is a multiple of this.
ALIGNMENT = 64


class Layout:
    """Arrays in a block, with guards around them."""

    def __init__(self) -> None:
        self._arrays: list[slice] = []
        self.nbytes = GUARD_BYTES

    def add(self, nbytes: int, shift: int = 0) -> slice:
        """Return the place of a further array, ``shift`` bytes behind an alignment."""
        start = -(-self.nbytes // ALIGNMENT) * ALIGNMENT + shift
        self._arrays.append(slice(start, start + nbytes))
        self.nbytes = start + nbytes + GUARD_BYTES
        return self._arrays[-1]

    def guards(self) -> list[slice]:
        """Return what lies between the arrays."""
        starts = [0, *(array.stop for array in self._arrays)]
        stops = [*(array.start for array in self._arrays), self.nbytes]
        return [slice(*bounds) for bounds in zip(starts, stops, strict=True)]


class Memory(Protocol):
    """Where kernels run."""

    def allocate(self, nbytes: int) -> int:
        """Get a block; return its address, a multiple of :data:`ALIGNMENT`."""

    def upload(self, block: np.ndarray, guards: Sequence[slice]) -> None:
        """Fill the block allocated last. Kernels have no business in ``guards``."""

    def download(self) -> np.ndarray:
        """Return what is in the block allocated last."""


class HostMemory:
    """The memory of this process."""

    def allocate(self, nbytes: int) -> int:
        """See :class:`Memory`."""
        room = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self._block = room[start : start + nbytes]
        return int(self._block.ctypes.data)

    def upload(self, block: np.ndarray, guards: Sequence[slice]) -> None:
        """See :class:`Memory`."""
        self._block[:] = block

    def download(self) -> np.ndarray:
        """See :class:`Memory`."""
        return self._block.copy()


class PoisonedMemory(HostMemory):
    """Memory in which AddressSanitizer ends the process that touches a guard.

    It works on 8 bytes at a time, so the last 7 bytes before an array may escape it.
    """

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        self._poison = process["__asan_poison_memory_region"]
        self._heal = process["__asan_unpoison_memory_region"]

    def upload(self, block: np.ndarray, guards: Sequence[slice]) -> None:
        """See :class:`Memory`."""
        super().upload(block, guards)
        for guard in guards:
            self._poison(*self._extent(guard))

    def download(self) -> np.ndarray:
        """See :class:`Memory`."""
        whole = slice(0, self._block.size)
        self._heal(*self._extent(whole))
        return super().download()

    def _extent(self, part: slice) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
        address = self._block.ctypes.data + part.start
        return ctypes.c_void_p(address), ctypes.c_size_t(part.stop - part.start)
