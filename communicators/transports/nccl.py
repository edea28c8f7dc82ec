"""Flat buffers inside one group of ranks, by NCCL.

The methods have the names and the contracts of those of
:class:`communicators.transports.mpi.MpiTransport`. Each is a generator that enqueues
one NCCL call and pauses once; nothing waits for it on the host. The buffer's fence says
when its contents are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from communicators.devices.buffer import DeviceBuffer
from communicators.transports.progress import Steps

if TYPE_CHECKING:
    from communicators.nccl_bindings import NcclCommunicator
    from communicators.transports.nccl_session import NcclSession

#: Requests to wait for after an NCCL call: none. Whoever drives several operations may
#: turn to another one here.
_PAUSE: tuple[Any, ...] = ()


class NcclTransport:
    """One group of ranks over an NCCL communicator of its own.

    Buffers are :class:`DeviceBuffer`, of the same length and dtype on all ranks, and
    are changed in place. All ranks issue the same operations in the same order.

    Args:
        session: NCCL as the whole communicator uses it.
        nccl: made for this group.
        label: the group's name in counters and errors.
        lane: operations of one lane run one after the other.

    Attributes:
        sent_bytes (int): bytes that this rank sends by the ring algorithms whose cost
            each method tells. NCCL may choose another algorithm.
    """

    def __init__(
        self, session: NcclSession, nccl: NcclCommunicator, label: str, lane: int
    ) -> None:
        self._session = session
        self.nccl = nccl
        self.label = label
        self.lane = lane
        self.rank = nccl.rank
        self.size = nccl.size
        self.sent_bytes = 0

    def reduce_scatter(self, buffer: DeviceBuffer, op: str, tag: int) -> Steps:
        """Reduce over the group; rank ``r`` ends with part ``r`` of the result.

        Args:
            buffer: its length is a multiple of the group's size.
            op: ``"sum"``, ``"mean"`` (adds, too), ``"max"``, ``"min"`` or ``"prod"``.
            tag: not needed here.

        Returns:
            DeviceBuffer: this rank's part of ``buffer``.
        Cost: each rank sends (p-1)/p * nbytes.
        """
        own = self._part(buffer, self.rank)
        self._enqueue(
            "reduce-scatter",
            [buffer],
            lambda stream: self.nccl.reduce_scatter(
                buffer.pointer, own.pointer, own.size, buffer.dtype.name, op, stream
            ),
        )
        self.sent_bytes += (self.size - 1) * own.nbytes
        yield _PAUSE
        return own

    def all_gather(self, buffer: DeviceBuffer, tag: int) -> Steps:
        """Give every rank all parts, rank ``r`` having put part ``r`` in its place.

        Cost: each rank sends (p-1)/p * nbytes.
        """
        own = self._part(buffer, self.rank)
        self._enqueue(
            "all-gather",
            [buffer],
            lambda stream: self.nccl.all_gather(
                own.pointer, buffer.pointer, own.size, buffer.dtype.name, stream
            ),
        )
        self.sent_bytes += (self.size - 1) * own.nbytes
        yield _PAUSE

    def all_reduce(self, buffer: DeviceBuffer, op: str, tag: int) -> Steps:
        """Reduce over the group; every rank ends with the whole, bit-identical result.

        Cost: each rank sends 2(p-1)/p * nbytes.
        """
        self._enqueue(
            "all-reduce",
            [buffer],
            lambda stream: self.nccl.all_reduce(
                *_in_place(buffer), buffer.size, buffer.dtype.name, op, stream
            ),
        )
        self.sent_bytes += 2 * (self.size - 1) * buffer.nbytes // self.size
        yield _PAUSE

    def reduce(self, buffer: DeviceBuffer, op: str, tag: int, root: int = 0) -> Steps:
        """Reduce over the group; ``root`` ends with the result.

        Cost: every rank but the root sends nbytes.
        """
        self._enqueue(
            "reduce",
            [buffer],
            lambda stream: self.nccl.reduce(
                *_in_place(buffer), buffer.size, buffer.dtype.name, op, root, stream
            ),
        )
        self.sent_bytes += buffer.nbytes * (self.rank != root)
        yield _PAUSE

    def broadcast(self, buffer: DeviceBuffer, tag: int, root: int = 0) -> Steps:
        """Copy the root's buffer to all ranks.

        Cost: every rank but the chain's last sends nbytes.
        """
        data = buffer.view("u1")
        self._enqueue(
            "broadcast",
            [buffer],
            lambda stream: self.nccl.broadcast(
                *_in_place(data), data.size, "uint8", root, stream
            ),
        )
        is_last = (self.rank - root) % self.size == self.size - 1
        self.sent_bytes += buffer.nbytes * (not is_last)
        yield _PAUSE

    def exchange(
        self,
        outgoing: Sequence[tuple[int, DeviceBuffer]],
        incoming: Sequence[tuple[int, DeviceBuffer]],
    ) -> None:
        """Send to and receive from any ranks at once. Collective.

        Args:
            outgoing: ``(dest, buffer)``; what goes to this rank itself, too.
            incoming: ``(source, buffer)``, from one source in the order of sending.
        """
        out = [(dest, b.view("u1")) for dest, b in outgoing if b.nbytes]
        into = [(source, b.view("u1")) for source, b in incoming if b.nbytes]

        def call(stream: int) -> None:
            binding = self._session.binding
            binding.group_start()
            try:
                for dest, b in out:
                    self.nccl.send(b.pointer, b.size, "uint8", dest, stream)
                for source, b in into:
                    self.nccl.recv(b.pointer, b.size, "uint8", source, stream)
            finally:
                # Also after an error: an open group would swallow all later calls.
                binding.group_end()

        if out or into:
            buffers = [b for _, b in [*outgoing, *incoming]]
            self._enqueue("send and receive", buffers, call)
        self.sent_bytes += sum(b.size for dest, b in out if dest != self.rank)

    def gather_all(self, own: DeviceBuffer, everything: DeviceBuffer) -> None:
        """Give every rank the buffers of all ranks, in rank order.

        Args:
            own: this rank's.
            everything: as long as those of all ranks together.
        """
        data = own.view("u1")
        self._enqueue(
            "all-gather",
            [own, everything],
            lambda stream: self.nccl.all_gather(
                data.pointer, everything.pointer, data.size, "uint8", stream
            ),
        )
        self.sent_bytes += (self.size - 1) * own.nbytes

    # -- parts ---

    def _part(self, buffer: DeviceBuffer, rank: int) -> DeviceBuffer:
        n_elems, rest = divmod(buffer.size, self.size)
        assert rest == 0, f"{buffer.size} elements in {self.size} equal parts"
        return buffer[rank * n_elems : (rank + 1) * n_elems]

    def _enqueue(
        self,
        operation: str,
        buffers: Sequence[DeviceBuffer],
        call: Callable[[int], None],
    ) -> None:
        """Issue one NCCL call on this lane's stream, ordered by the buffers' fences."""
        first = buffers[0]
        self._session.issue(
            f"{operation} of {first.size} {first.dtype.name}", self, buffers, call
        )


def _in_place(buffer: DeviceBuffer) -> tuple[int, int]:
    return buffer.pointer, buffer.pointer
