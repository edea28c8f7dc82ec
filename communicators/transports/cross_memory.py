"""Reading and writing the memory of the other processes of a machine.

Linux's ``process_vm_readv`` copies from one process to another without a buffer in
between: half of the copies, and less traffic between caches, than by shared memory
that both sides copy into and out of. Python calls it without holding its lock.

Source: ``process_vm_readv(2)``; the same is what MPI libraries call CMA.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

import numpy as np

from communicators.dtypes import Array
from communicators.errors import CommunicatorError

#: Environment variable: ``0`` keeps ranks out of each other's memory; MPI takes over.
CROSS_MEMORY_VARIABLE = "CHAINERMN_NG_CROSS_MEMORY"

#: Most pieces of memory in one call (Linux's UIO_MAXIOV).
MAX_PIECES = 1024

# Of prctl(2): lets a security module that would refuse it (Yama) know that the other
# processes of this user may reach into this one.
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value


@functools.cache
def _calls() -> tuple[Any, Any]:
    libc = ctypes.CDLL(None, use_errno=True)
    calls = libc.process_vm_readv, libc.process_vm_writev
    for call in calls:
        call.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
        call.restype = ctypes.c_ssize_t
    return calls


def why_not() -> str | None:
    """Return why this process keeps away from the memory of others, or ``None``."""
    value = os.environ.get(CROSS_MEMORY_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{CROSS_MEMORY_VARIABLE}={value!r}: expected 0 or 1")
    if value == "0":
        return f"{CROSS_MEMORY_VARIABLE}=0"
    if sys.platform != "linux":
        return "needs Linux (process_vm_readv)"
    try:
        _calls()
    except (AttributeError, OSError) as error:
        return f"the C library has no process_vm_readv ({error})"
    return None


def let_others_in() -> None:
    """Ask Yama, where it is at work, to let this user's processes reach this one."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    # Without Yama it fails, and nothing is in the way.
    prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def address_of(array: Array) -> int:
    """Return the address of an array's first byte in this process."""
    address: int = array.ctypes.data
    return address


class Process:
    """The memory of one process of this machine, which may be this one.

    Pieces of memory are rows ``(address, nbytes)`` of uint64 arrays; the functions take
    the address of the first row and the number of rows, so that tables are made once.

    Args:
        pid: number of the process.
        who: names it in errors.
    """

    def __init__(self, pid: int, who: str) -> None:
        self._pid = pid
        self._who = who
        self._read, self._write = _calls()
        self._rows = np.zeros((2, 2), np.uint64)
        self._local = address_of(self._rows[0])
        self._remote = address_of(self._rows[1])

    def read_pieces(
        self, local: int, n_local: int, remote: int, n_remote: int, nbytes: int
    ) -> None:
        """Copy pieces of its memory into pieces of this process's.

        Args:
            local: address of the table of pieces here.
            n_local: number of rows.
            remote: address of the table, in this process, of the pieces there.
            n_remote: number of rows.
            nbytes: in all.

        Raises:
            CommunicatorError: it is gone, or does not let this process in.
        """
        ctypes.set_errno(0)
        if self._read(self._pid, local, n_local, remote, n_remote, 0) != nbytes:
            self._fail("read from")

    def write_pieces(
        self, local: int, n_local: int, remote: int, n_remote: int, nbytes: int
    ) -> None:
        """Copy pieces of this process's memory into pieces of its. As the above."""
        ctypes.set_errno(0)
        if self._write(self._pid, local, n_local, remote, n_remote, 0) != nbytes:
            self._fail("write to")

    def read_into(self, array: Array, address: int) -> None:
        """Copy ``array.nbytes`` bytes from ``address`` there into a contiguous array.

        Raises:
            CommunicatorError: as in :meth:`read_pieces`.
        """
        at, left = address_of(array), array.nbytes
        while left:
            # One call moves at most 2 GiB less a page.
            n = min(left, 1 << 30)
            self._rows[0] = at, n
            self._rows[1] = address, n
            self.read_pieces(self._local, 1, self._remote, 1, n)
            at, address, left = at + n, address + n, left - n

    def _fail(self, what: str) -> None:
        code = ctypes.get_errno()
        reason = os.strerror(code) if code else "only a part could be copied"
        raise CommunicatorError(
            f"cannot {what} the memory of {self._who} (process {self._pid}): {reason}"
        )
