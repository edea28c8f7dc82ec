"""Reduce in the host, all-reduce among the hosts' leaders, broadcast in the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import FlatBuffer
from communicators.transports.progress import Handle, Steps

if TYPE_CHECKING:
    from communicators.transports.group import Group


class HierarchicalCommunicator(CommunicatorBase):
    """Lets one rank a host use the network. For hosts with one slow network card.

    Hosts may have different numbers of ranks.

    Cost: in the host every rank sends, or copies from the others, at most 2 M bytes;
    the leaders send 2(1 - 1/N) M bytes to each other (N hosts).
    """

    name = "hierarchical"
    device_types = ("cpu", "gpu")
    reduces_by_world_ring = False

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        intra = self.create_group("intra", self.inter_rank, self.intra_rank)
        assert intra is not None
        self._intra = intra
        is_leader = self.intra_rank == 0
        self._inter = self.create_group(
            "inter", 0 if is_leader else None, self.inter_rank
        )

    def in_place_group(self) -> Group | None:
        return self._intra if self.inter_size == 1 else None

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        return self.start_steps(self._all_reduce(buffer, op, self.next_tag()))

    def _all_reduce(self, buffer: FlatBuffer, op: str, tag: int) -> Steps:
        if self._inter is None:
            yield from self._intra.reduce(buffer, op, tag)
        else:
            with self._inter.line_up() as place:
                yield from self._intra.reduce(buffer, op, tag)
                if not isinstance(buffer, DeviceBuffer):
                    yield [place]
                yield from self._inter.all_reduce(buffer, op, tag)
        yield from self._intra.broadcast(buffer, tag)
