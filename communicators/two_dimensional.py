"""Reduce-scatter in the host, all-reduce between equal local ranks, all-gather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.device import FlatBuffer
from communicators.errors import TopologyError
from communicators.grid import create_grid_groups, grid_all_reduce
from communicators.topology import default_dims
from communicators.transports.progress import Handle

if TYPE_CHECKING:
    from communicators.transports.group import Group


class TwoDimensionalCommunicator(CommunicatorBase):
    """Lets all ranks of a host use the network at once. For several cards a host.

    The grid of (ranks a host, hosts).

    Raises:
        TopologyError: hosts with different numbers of ranks.
    Cost: each rank sends 2(1 - 1/G) M bytes in the host and 2(1 - 1/N) M/G bytes
        between hosts.
    """

    name = "two_dimensional"
    device_types = ("cpu", "gpu")
    reduces_by_world_ring = False

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        try:
            default_dims(self.topology)
        except TopologyError as error:
            raise TopologyError(f"two_dimensional: {error}") from error
        dims = (self.topology.host_sizes[0], self.topology.n_hosts)
        self._groups_by_dim = create_grid_groups(self, dims, ("intra", "inter"))

    def in_place_group(self) -> Group | None:
        return self._groups_by_dim[0] if self.inter_size == 1 else None

    @property
    def buffer_parts(self) -> int:
        return self.size

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        tag = self.next_tag()
        return self.start_steps(grid_all_reduce(self._groups_by_dim, buffer, op, tag))
