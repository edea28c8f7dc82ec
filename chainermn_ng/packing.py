"""Any picklable object as a small pickle and the bytes of its arrays.

The arrays of an object need not be pickled into one long text: protocol 5 of pickle
hands over their memory (PEP 574), which can then travel, or be shared between the ranks
of a host, as it is. Wherever the arrays are (in lists, dictionaries, data sets,
attributes of one's own classes), what is unpacked equals what was packed, dtypes and
memory order included.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from communicators.object_collectives import pickled

# So that every array begins at an address that suits its dtype, and at a cache line.
_ALIGNMENT = 64


class Packed:
    """An object taken apart; the arrays are not copied.

    Args:
        obj: any picklable object. Contiguous arrays of NumPy in it give their memory;
            all else, also CuPy's arrays (by way of the host), goes into the pickle.
        label: of what, for errors.

    Attributes:
        head (numpy.ndarray): uint8, the pickle without the arrays.
        sizes (list): bytes of each array.

    Raises:
        TypeError: the object cannot be pickled; the text names the part that cannot.
    """

    def __init__(self, obj: Any, label: str) -> None:
        buffers: list[pickle.PickleBuffer] = []
        try:
            head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
        except Exception:
            # It fails here too, and knows which part is to blame.
            pickled(obj, label)
            raise
        self.head = np.frombuffer(head, np.uint8)
        self._parts = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        self.sizes = [part.size for part in self._parts]

    @property
    def nbytes(self) -> int:
        """Bytes that :meth:`write_arrays` needs."""
        return layout(self.sizes)[1]

    def write_arrays(self, memory: np.ndarray) -> None:
        """Copy the arrays into flat memory.

        Args:
            memory: uint8, of at least :attr:`nbytes` elements.
        """
        offsets, _ = layout(self.sizes)
        for offset, part in zip(offsets, self._parts, strict=True):
            memory[offset : offset + part.size] = part


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where arrays of so many bytes lie in flat memory, and its length."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def unpack(
    head: np.ndarray, sizes: Sequence[int], memory: np.ndarray, *, read_only: bool
) -> Any:
    """Put a packed object together again; its arrays are views of ``memory``.

    Args:
        head: see :class:`Packed`.
        sizes: see :class:`Packed`.
        memory: uint8, what :meth:`Packed.write_arrays` wrote.
        read_only: forbid writing into the arrays.
    """
    view = memoryview(memory)
    offsets, _ = layout(sizes)
    parts = [
        view[offset : offset + size]
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    if read_only:
        parts = [part.toreadonly() for part in parts]
    return pickle.loads(head.tobytes(), buffers=parts)
