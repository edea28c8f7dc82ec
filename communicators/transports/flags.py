"""Flags by which the ranks of one host follow each other, in memory that they share.

A flag is a number that only grows, on a cache line of its own, written by one rank
and read by all. Whoever waits for flags looks at them as at requests of MPI, so the
same loop waits for both, with the same time limit.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from typing import Any

from communicators.dtypes import Array
from communicators.errors import RankFailedError
from communicators.transports.host_memory import SharedFile, map_file

#: Words of 8 bytes of a cache line.
_LINE_WORDS = 8
#: Operations in flight that have flags of their own: more than many buckets in flight
#: have chunks.
N_SLOTS = 512
#: Stages of one operation.
N_STAGES = 16
# The last ones are those of ranks that do not go on with it: because they have heard of
# another one that does not, or for a reason of their own.
_STOPPED = N_STAGES - 2
_FAILED = N_STAGES - 1

# x86 makes stores visible in their order. Other processors need to be told to.
_KEEPS_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")
_fences = threading.Lock(), threading.Lock()


def _fence() -> None:
    """Let no access before this be seen after one that comes behind it."""
    if not _KEEPS_ORDER:
        # What stands before a lock is given back stays before it, what comes after
        # one is taken stays after it, and neither order is changed.
        for lock in _fences:
            lock.acquire()
            lock.release()


class Flags:
    """The flags of one group of ranks.

    Operations are numbered, alike on all ranks; those whose numbers differ by less than
    :data:`N_SLOTS` may be in flight at once. An operation has stages 1, 2, ...; a rank
    that raises its flag for a stage says that it has reached it, and with it goes one
    number that the others can read.

    Args:
        memory: zeros shared by the ranks; of :meth:`nbytes_for` bytes.
        rank: this process's number in the group.
        size: of the group.
    """

    def __init__(self, memory: Array, rank: int, size: int) -> None:
        self._memory = memory
        self.words = memory.data.cast("B").cast("Q")
        self._size = size
        self._others = [r for r in range(size) if r != rank]
        self._own = self._line(rank, 0)

    @staticmethod
    def nbytes_for(size: int) -> int:
        """Return how much memory the flags of ``size`` ranks take."""
        return size * N_SLOTS * _LINE_WORDS * 8

    @classmethod
    def share(cls, mpi_comm: Any) -> Flags:
        """Make the flags of an mpi4py communicator, all on one host. Collective.

        Raises:
            OSError, UnavailableError: the ranks cannot share memory. Not on all.
        """
        rank, size = mpi_comm.Get_rank(), mpi_comm.Get_size()
        nbytes = cls.nbytes_for(size)
        file, error, ticket = None, None, None
        if rank == 0:
            try:
                file = SharedFile(nbytes)
                ticket = file.ticket
            except Exception as failure:  # the others wait to be told
                error = failure
        ticket, error = mpi_comm.bcast((ticket, error), root=0)
        memory = None
        if error is None:
            try:
                memory = map_file(ticket, nbytes)
            except Exception as failure:
                error = failure
        # The descriptor must be open until all have mapped the file.
        mpi_comm.Barrier()
        if file is not None:
            file.close()
        if error is not None:
            raise error
        assert memory is not None
        return cls(memory, rank, size)

    def raise_own(self, operation: int, stage: int, value: int | None = None) -> None:
        """Say that this rank has reached a stage.

        Args:
            operation: its number.
            stage: 1 to :data:`N_STAGES` - 3; larger than the last one.
            value: 0 to 2**64 - 1, for the others to read; ``None`` leaves the last.
        """
        at = self._own + operation % N_SLOTS * _LINE_WORDS
        if value is not None:
            self.words[at + 1] = value
        _fence()
        flag = operation * N_STAGES + stage
        assert flag > self.words[at], "a flag only grows"
        self.words[at] = flag

    def fail(self, operation: int, *, has_heard: bool = False) -> None:
        """Say that this rank does not go on: whoever waits for it gets an error.

        Args:
            operation: its number.
            has_heard: because another rank does not.
        """
        at = self._own + operation % N_SLOTS * _LINE_WORDS
        stage = _STOPPED if has_heard else _FAILED
        self.words[at] = max(operation * N_STAGES + stage, self.words[at])

    def raise_if_failed(self, operation: int) -> None:
        """Raise if a rank does not go on with an operation.

        Raises:
            RankFailedError: it has failed, or given up waiting.
        """
        slot = operation % N_SLOTS
        found = [self.words[self._line(rank, slot)] for rank in range(self._size)]
        for stage in (_FAILED, _STOPPED):
            flag = operation * N_STAGES + stage
            if flag in found:
                raise RankFailedError(
                    f"rank {found.index(flag)} of the ranks on this host has failed in "
                    "the middle of a reduction; the arrays are not reduced"
                )

    def all_at(self, operation: int, stage: int) -> Reached:
        """Return what can be asked whether all ranks have reached a stage."""
        slot = operation % N_SLOTS
        lines = [self._line(rank, slot) for rank in self._others]
        return Reached(self, operation, lines, operation * N_STAGES + stage)

    def values(self, operation: int) -> Sequence[int]:
        """Return the values of all ranks, when all have reached a stage."""
        _fence()
        slot = operation % N_SLOTS
        return [self.words[self._line(rank, slot) + 1] for rank in range(self._size)]

    def _line(self, rank: int, slot: int) -> int:
        return (rank * N_SLOTS + slot) * _LINE_WORDS


class Reached:
    """Flags to wait for, asked like a request of MPI."""

    def __init__(
        self, flags: Flags, operation: int, lines: list[int], value: int
    ) -> None:
        self._flags = flags
        self._operation = operation
        self._lines = lines
        self._value = value

    def Test(self) -> bool:
        """Tell whether all flags are there.

        Raises:
            RankFailedError: a rank does not go on.
        """
        words, lines, value = self._flags.words, self._lines, self._value
        while lines and words[lines[-1]] >= value:
            lines.pop()
        if lines:
            return False
        self._flags.raise_if_failed(self._operation)
        return True
