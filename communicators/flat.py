"""One ring of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.base import CommunicatorBase
from communicators.devices.device import FlatBuffer
from communicators.transports.progress import Handle

if TYPE_CHECKING:
    from communicators.transports.group import Group


class FlatCommunicator(CommunicatorBase):
    """Reduces each bucket on one ring of all ranks. For uniform networks.

    Cost: 2(P-1) steps a bucket; each rank sends 2(1 - 1/P) M bytes.
    """

    name = "flat"
    device_types = ("cpu", "gpu")

    def in_place_group(self) -> Group | None:
        return self.world_ring()

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
        return self.start_steps(steps)
