"""Chooses a communicator by the topology."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import FlatBuffer
from communicators.registry import create_communicator
from communicators.topology import Topology
from communicators.transports.progress import Handle

if TYPE_CHECKING:
    from communicators.transports.group import Group

_logger = logging.getLogger("chainermn_ng")


def choose(topology: Topology) -> tuple[str, str]:
    """Return the communicator for a topology, and why."""
    if topology.n_hosts == 1:
        return "flat", "all ranks share one host"
    if max(topology.host_sizes) == 1:
        return "multi_ring", "one rank on each host"
    if topology.is_uniform:
        return "multi_ring", "several hosts with equal numbers of ranks"
    return "hierarchical", "hosts with unequal numbers of ranks"


class AutoCommunicator(CommunicatorBase):
    """Reduces as the communicator that suits the topology does.

    One host: ``flat``. Several hosts with equal numbers of ranks: ``multi_ring``.
    Unequal hosts: ``hierarchical``. Rank 0 logs the choice to ``chainermn_ng``. GPU
    arrays go by one NCCL all-reduce over all ranks, as with ``pure_nccl``: NCCL has its
    own measure of the topology.

    Attributes:
        chosen (str): the name of the communicator that it took.
    """

    name = "auto"
    device_types = ("cpu", "gpu")

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        self.chosen, reason = choose(self.topology)
        self._inner = self.hold(
            create_communicator(self.chosen, self.mpi_comm, **self.options),
            on_devices=False,
        )
        if self.rank == 0:
            _logger.info(
                "auto: %s for %d ranks on %s: %s",
                self.chosen,
                self.size,
                self.topology,
                reason,
            )

    def in_place_group(self) -> Group | None:
        return self._inner.in_place_group()

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        if isinstance(buffer, DeviceBuffer):
            steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
            return self.start_steps(steps)
        return self._inner.start_all_reduce_flat(buffer, op)
