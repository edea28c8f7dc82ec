"""A flat buffer in memory that NCCL reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np


class Fence:
    """What must have happened before a buffer's contents may be used.

    Attributes:
        event: of the last operation that was given the buffer; ``None`` for none.
        parts: fences of the parts that operations run on by themselves.
    """

    __slots__ = ("event", "parts")

    def __init__(self) -> None:
        self.event: Any = None
        self.parts: list[Fence] = []

    def events(self) -> list[Any]:
        """Return all events to wait for."""
        found = [] if self.event is None else [self.event]
        for part in self.parts:
            found += part.events()
        return found


class DeviceBuffer:
    """One-dimensional contiguous memory with a dtype that NumPy knows.

    The dtype is only a label, so that bfloat16 needs no support by CuPy. Slices and
    views share the memory and the fence.

    Args:
        owner: what keeps the memory alive.
        pointer: address of the first element.
        n_elems: number of elements.
        dtype: of the elements.
        fence: when the contents are ready; a new one by default.
    """

    __slots__ = ("dtype", "fence", "owner", "pointer", "size")

    def __init__(
        self,
        owner: Any,
        pointer: int,
        n_elems: int,
        dtype: np.dtype[Any],
        fence: Fence | None = None,
    ) -> None:
        self.owner = owner
        self.pointer = pointer
        self.size = n_elems
        self.dtype = dtype
        self.fence = Fence() if fence is None else fence

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceBuffer:
        start, stop, step = part.indices(self.size)
        assert step == 1
        n_elems = max(0, stop - start)
        pointer = self.pointer + start * self.itemsize
        return DeviceBuffer(self.owner, pointer, n_elems, self.dtype, self.fence)

    def view(self, dtype: Any) -> DeviceBuffer:
        """Return the same bytes as elements of another dtype."""
        dtype = np.dtype(dtype)
        n_elems = self.nbytes // dtype.itemsize
        return DeviceBuffer(self.owner, self.pointer, n_elems, dtype, self.fence)

    def independent(self, part: slice) -> DeviceBuffer:
        """Return a part on which operations run by themselves.

        They wait for what was done with the whole buffer before, and whoever uses
        the whole afterwards waits for them.
        """
        found = self[part]
        found.fence = Fence()
        found.fence.event = self.fence.event
        self.fence.parts.append(found.fence)
        return found
