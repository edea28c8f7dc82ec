"""One group of ranks: host arrays move directly or by MPI, device buffers by NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from communicators.devices.buffer import DeviceBuffer
from communicators.transports.mpi import MpiTransport
from communicators.transports.progress import Steps
from communicators.transports.same_host import SameHostTransport

if TYPE_CHECKING:
    from communicators.transports.nccl import NcclTransport
    from communicators.transports.turnstile import Place


#: Smaller buffers go by MPI in a host, too: ranks that outnumber the cores find a
#: message sooner than a flag. Measured on two hosts of two ranks each, with 64 KiB: by
#: flags 1.7 to 2.3 ms, by messages 1.4 to 2.0 ms.
SAME_HOST_BYTES = 256 * 1024


class Group:
    """The transports among one group of ranks.

    Contracts of the operations are in :class:`MpiTransport`; each goes to the
    transport that takes the buffer.

    Args:
        mpi: over an MPI communicator that nobody else uses.
        same_host: among the same ranks, if they reach each other's memory.

    Attributes:
        mpi: for host memory, if there is nothing faster.
        same_host: for host memory, or ``None``.
        nccl (NcclTransport | None): for device buffers; there once the communicator
            has been used with such.
    """

    def __init__(
        self, mpi: MpiTransport, same_host: SameHostTransport | None = None
    ) -> None:
        self.mpi = mpi
        self.same_host = same_host
        self.nccl: NcclTransport | None = None

    @property
    def label(self) -> str:
        """The group's name in counters and errors."""
        return self.mpi.label

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.mpi.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.mpi.size

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in the group."""
        transports = (self.mpi, self.same_host, self.nccl)
        return sum(t.sent_bytes for t in transports if t is not None)

    def finalize(self) -> None:
        """Free the MPI communicator. Collective; safe to call twice."""
        self.mpi.finalize()

    def line_up(self) -> Place:
        """See :meth:`MpiTransport.line_up`."""
        return self.mpi.line_up()

    def transport_of(
        self, buffer: Any
    ) -> MpiTransport | SameHostTransport | NcclTransport:
        """Return the transport that takes ``buffer``."""
        if isinstance(buffer, DeviceBuffer):
            assert self.nccl is not None, f"{self.label}: NCCL has not been set up"
            return self.nccl
        if self.same_host is None or buffer.nbytes < SAME_HOST_BYTES:
            return self.mpi
        return self.same_host

    def reduce_scatter(self, buffer: Any, op: str, tag: int) -> Steps:
        """See :meth:`MpiTransport.reduce_scatter`."""
        return self.transport_of(buffer).reduce_scatter(buffer, op, tag)

    def all_gather(self, buffer: Any, tag: int) -> Steps:
        """See :meth:`MpiTransport.all_gather`."""
        return self.transport_of(buffer).all_gather(buffer, tag)

    def all_reduce(self, buffer: Any, op: str, tag: int) -> Steps:
        """See :meth:`MpiTransport.all_reduce`."""
        return self.transport_of(buffer).all_reduce(buffer, op, tag)

    def reduce(self, buffer: Any, op: str, tag: int, root: int = 0) -> Steps:
        """See :meth:`MpiTransport.reduce`."""
        return self.transport_of(buffer).reduce(buffer, op, tag, root)

    def broadcast(self, buffer: Any, tag: int, root: int = 0) -> Steps:
        """See :meth:`MpiTransport.broadcast`."""
        return self.transport_of(buffer).broadcast(buffer, tag, root)
