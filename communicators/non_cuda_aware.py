"""Host by host, with only host memory given to MPI."""

from __future__ import annotations

from typing import Any

from communicators.base import CommunicatorBase
from communicators.dtypes import Array
from communicators.hierarchical import HierarchicalCommunicator
from communicators.transports.progress import Handle


class NonCudaAwareCommunicator(CommunicatorBase):
    """For an MPI that cannot read device memory.

    On CPU ranks all memory is host memory, so it reduces exactly as ``hierarchical``
    does. Hosts may have different numbers of ranks.
    """

    name = "non_cuda_aware"

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        self._on_host = self.hold(
            HierarchicalCommunicator(self.mpi_comm, **self.options)
        )

    def start_all_reduce_flat(self, buffer: Array, op: str) -> Handle:
        return self._on_host.start_all_reduce_flat(buffer, op)
