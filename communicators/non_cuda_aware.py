"""Host by host, with only host memory given to MPI."""

from __future__ import annotations

from typing import Any

from communicators.base import CommunicatorBase
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import FlatBuffer
from communicators.transports.progress import Handle, Steps


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

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        intra = self.create_group("intra", self.inter_rank, self.intra_rank)
        assert intra is not None
        self._intra = intra
        is_leader = self.intra_rank == 0
        # No group: between hosts there is no NCCL here.
        self._leaders = self.create_mpi_transport(
            "inter", 0 if is_leader else None, self.inter_rank
        )

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        return self.start_steps(self._all_reduce(buffer, op, self.next_tag()))

    def _all_reduce(self, buffer: FlatBuffer, op: str, tag: int) -> Steps:
        yield from self._intra.reduce(buffer, op, tag)
        if self._leaders is not None:
            if isinstance(buffer, DeviceBuffer):
                device = self.nccl_device
                host = device.host_buffer(buffer.size, buffer.dtype)
                yield [_Reached(device, device.copy_to_host(buffer, host))]
                yield from self._leaders.all_reduce(host, op, tag)
                device.copy_from_host(host, buffer)
            else:
                yield from self._leaders.all_reduce(buffer, op, tag)
        yield from self._intra.broadcast(buffer, tag)


class _Reached:
    """An event of a device, asked like a request of MPI."""

    def __init__(self, device: Any, event: Any) -> None:
        self._device = device
        self._event = event

    def Test(self) -> bool:
        return bool(self._device.is_done(self._event))
