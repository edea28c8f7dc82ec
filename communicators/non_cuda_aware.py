"""Host by host, with only host memory given to MPI."""

from __future__ import annotations

from typing import Any

from communicators.base import Array, CommunicatorBase
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
        self._on_host = HierarchicalCommunicator(self.mpi_comm, **self.options)

    @property
    def sent_bytes(self) -> dict[str, int]:
        inner = self._on_host.sent_bytes
        outer = super().sent_bytes
        return {k: inner.get(k, 0) + outer.get(k, 0) for k in {**inner, **outer}}

    def start_all_reduce_flat(self, buffer: Array, op: str) -> Handle:
        return self._on_host.start_all_reduce_flat(buffer, op)

    def finalize(self) -> None:
        self._on_host.finalize()
        super().finalize()
