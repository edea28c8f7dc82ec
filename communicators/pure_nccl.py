"""NCCL over all ranks."""

from __future__ import annotations

from typing import Any

from communicators import nccl_bindings
from communicators.base import CommunicatorBase
from communicators.devices.device import FlatBuffer
from communicators.errors import UnavailableError
from communicators.transports.progress import Handle


class PureNcclCommunicator(CommunicatorBase):
    """One NCCL all-reduce over all ranks. For GPUs, the usual choice.

    Averages models on GPUs only; single NumPy arrays, such as metrics, travel by MPI.

    Raises:
        UnavailableError: no NCCL binding, or no NCCL library; on all ranks.
    Cost: NCCL chooses the algorithm; counted as a ring: 2(1 - 1/P) M bytes a rank.
    """

    name = "pure_nccl"
    device_types = ("gpu",)

    @classmethod
    def missing(cls) -> str | None:
        found = super().missing()
        if found is not None:
            return found
        reasons = []
        for name in nccl_bindings.BINDINGS:
            reason = nccl_bindings.missing(name)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons)

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        super().__init__(mpi_comm, **options)
        self.agree("create pure_nccl", error=self._binding_error())

    def _binding_error(self) -> UnavailableError | None:
        try:
            nccl_bindings.load(self.nccl_binding)
        except UnavailableError as error:
            return error
        return None

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
        return self.start_steps(steps)
