"""One ring of the ranks of one host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.device import FlatBuffer
from communicators.errors import TopologyError
from communicators.transports.progress import Handle

if TYPE_CHECKING:
    from communicators.transports.group import Group


class SingleNodeCommunicator(CommunicatorBase):
    """As ``flat``, and refuses to run on more than one host. For one machine.

    Raises:
        TopologyError: the ranks are on several hosts.
    """

    name = "single_node"
    device_types = ("cpu", "gpu")

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        if self.inter_size > 1:
            raise TopologyError(
                f"single_node works on one host; the {self.size} ranks are on "
                f"{self.inter_size} ({self.topology}). Use flat or hierarchical"
                + (
                    ", two_dimensional or multi_ring"
                    if self.topology.is_uniform
                    else ""
                )
            )

    def in_place_group(self) -> Group | None:
        return self.world_ring()

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
        return self.start_steps(steps)
