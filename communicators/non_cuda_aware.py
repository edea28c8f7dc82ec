"""Host by host, with only host memory given to MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import FlatBuffer, NcclDevice
from communicators.dtypes import Array
from communicators.transports.progress import Handle, Steps

if TYPE_CHECKING:
    from communicators.transports.group import Group


class NonCudaAwareCommunicator(CommunicatorBase):
    """For GPUs whose network NCCL cannot use, and an MPI that reads host memory only.

    GPU arrays: NCCL reduces in the host, the leaders exchange through pinned host
    memory and MPI, NCCL broadcasts in the host. NumPy arrays: exactly as
    ``hierarchical``. Hosts may have different numbers of ranks.

    Cost: as ``hierarchical``; on the leaders two copies of M bytes between device and
        host more, and the host waits for both.
    """

    name = "non_cuda_aware"
    device_types = ("cpu", "gpu")
    nccl_spans_hosts = False
    reduces_by_world_ring = False

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        intra = self.create_group("intra", self.inter_rank, self.intra_rank)
        assert intra is not None
        #: Ranks of this host.
        self.intra = intra
        is_leader = self.intra_rank == 0
        # No group: between hosts there is no NCCL here.
        #: First ranks of the hosts; ``None`` on the others.
        self.leaders = self.create_mpi_transport(
            "inter", 0 if is_leader else None, self.inter_rank
        )

    def in_place_group(self) -> Group | None:
        return self.intra if self.inter_size == 1 else None

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        tag = self.next_tag()
        if isinstance(buffer, DeviceBuffer):
            return _ThroughHost(self, buffer, op, tag)
        return self.start_steps(self._all_reduce(buffer, op, tag))

    def _all_reduce(self, buffer: Array, op: str, tag: int) -> Steps:
        yield from self.intra.reduce(buffer, op, tag)
        if self.leaders is not None:
            yield from self.leaders.all_reduce(buffer, op, tag)
        yield from self.intra.broadcast(buffer, tag)


class _ThroughHost:
    """A device buffer's way through host memory.

    NCCL's calls must come in one order on all ranks of a host, but only the leader
    waits for the network. So the reduction is issued at once and the broadcast in
    ``wait``, which all ranks call in one order; the leaders' exchanges go on between.
    """

    def __init__(
        self, comm: NonCudaAwareCommunicator, buffer: DeviceBuffer, op: str, tag: int
    ) -> None:
        self._comm = comm
        self._buffer = buffer
        self._tag = tag
        comm.start_steps(comm.intra.reduce(buffer, op, tag)).wait()
        self._exchange: Handle | None = None
        if comm.leaders is not None:
            self._device = comm.nccl.device
            self._host = self._device.host_buffer(buffer.size, buffer.dtype)
            copied = _Reached(
                self._device, self._device.copy_to_host(buffer, self._host)
            )
            self._exchange = comm.start_steps(self._between_hosts(copied, op))

    def _between_hosts(self, copied: _Reached, op: str) -> Steps:
        assert self._comm.leaders is not None
        # MPI must not see what the device has not written yet.
        yield [copied]
        yield from self._comm.leaders.all_reduce(self._host, op, self._tag)

    def wait(self) -> None:
        if self._exchange is not None:
            self._exchange.wait()
            self._device.copy_from_host(self._host, self._buffer)
        steps = self._comm.intra.broadcast(self._buffer, self._tag)
        self._comm.start_steps(steps).wait()


class _Reached:
    """An event of a device, asked like a request of MPI."""

    def __init__(self, device: NcclDevice, event: Any) -> None:
        self._device = device
        self._event = event

    def Test(self) -> bool:
        return self._device.is_done(self._event)
