"""Memory that the ranks of one host share, for as long as any of them uses it.

An MPI window would have to be freed by all ranks together, and arrays in it would point
to nothing afterwards. Here it is a file without a name (Linux ``memfd_create``): each
rank maps it, and the kernel frees it when the last mapping is gone, by garbage
collection on each rank at its own time, or by the death of the rank. Nothing is left
over, and the size of ``/dev/shm`` does not limit it.
"""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
from dataclasses import dataclass

import numpy as np

from communicators.dtypes import Array
from communicators.errors import UnavailableError


@dataclass(frozen=True)
class Ticket:
    """By what the other ranks of the host find the file.

    Attributes:
        path: of the file, as the owner's open descriptor.
        device: number of the device that holds the file.
        inode: its number there; with ``device`` it tells the file from all others.
    """

    path: str
    device: int
    inode: int


def available_bytes() -> int:
    """Return how much memory this process may still get, as far as Linux tells."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    free = next(line for line in lines if line.startswith("MemAvailable:"))
    limit = int(free.split()[1]) * 1024
    # In a container there may be less.
    group = pathlib.Path("/sys/fs/cgroup/memory.max")
    if group.exists() and group.read_text().strip().isdecimal():
        limit = min(limit, int(group.read_text()))
    return limit


class SharedFile:
    """A file without a name, open in the rank that made it.

    Args:
        nbytes: its length; the memory is reserved at once.

    Raises:
        OSError: there is not so much memory.
        UnavailableError: this system cannot do it.
    """

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UnavailableError(
                "memory shared between the ranks of a host needs Linux (memfd_create)"
            )
        # Asked for more than there is, the kernel kills processes.
        if nbytes > available_bytes():
            raise OSError(
                errno.ENOMEM,
                f"{nbytes} bytes of shared memory: only {available_bytes()} are there",
            )
        self._descriptor = os.memfd_create("chainermn_ng", os.MFD_CLOEXEC)
        try:
            # Now, and not when a rank writes into it.
            os.posix_fallocate(self._descriptor, 0, max(nbytes, 1))
            status = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno, f"{nbytes} bytes of shared memory: {error.strerror}"
            ) from error
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.ticket = Ticket(path, status.st_dev, status.st_ino)

    def close(self) -> None:
        """Give up the descriptor; what is mapped stays."""
        os.close(self._descriptor)


def map_file(ticket: Ticket, nbytes: int) -> Array:
    """Return the memory of a file as an array: uint8, ``nbytes`` elements, writable.

    Raises:
        OSError: the file cannot be reached, or is another one: the ranks are in
            containers that do not see each other's processes.
    """
    descriptor = os.open(ticket.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (ticket.device, ticket.inode):
            raise OSError(
                f"{ticket.path} is not the memory that a rank of this host offers; the "
                "ranks do not see each other's processes"
            )
        memory = mmap.mmap(descriptor, max(nbytes, 1))
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8, nbytes)
