"""The memory of a GPU as the kernels' cases use it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
from host_kernels.memory import ALIGNMENT


class DeviceMemory:
    """A block on the current device; see :class:`host_kernels.memory.Memory`.

    Args:
        cp: CuPy.
    """

    def __init__(self, cp: ModuleType) -> None:
        self._cp = cp

    def allocate(self, nbytes: int) -> int:
        """Get a block; return its address."""
        room = self._cp.empty(nbytes + ALIGNMENT, np.uint8)
        start = -room.data.ptr % ALIGNMENT
        self._block = room[start : start + nbytes]
        return int(self._block.data.ptr)

    def upload(self, block: np.ndarray, guards: Sequence[slice]) -> None:
        """Fill the block; what a kernel writes into the guards shows afterwards."""
        self._block[...] = self._cp.asarray(block)

    def download(self) -> np.ndarray:
        """Return what is in the block."""
        return self._block.get()
