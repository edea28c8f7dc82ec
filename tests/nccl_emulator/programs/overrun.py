"""A call with a count that its buffer does not have."""

from __future__ import annotations

import numpy as np

from nccl_emulator.ranks import Ranks


def too_short(ranks: Ranks) -> None:
    """Reduce one element more than there is."""
    comm = ranks.join()
    array = np.zeros(100, np.float32)
    pointer = array.ctypes.data
    ranks.library.call("AllReduce", pointer, pointer, 101, 7, 0, comm.handle, None)
