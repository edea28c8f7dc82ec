"""One all-reduce an array, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.device import FlatBuffer

if TYPE_CHECKING:
    from communicators.transports.group import Group


class NaiveCommunicator(CommunicatorBase):
    """Reduces every array by itself, on a ring of all ranks. For reference, debugging.

    Options are those of :class:`CommunicatorBase`; arrays are never put together, so
    ``bucket_bytes`` is taken as 0.

    Cost: 2(P-1) steps an array; each rank sends 2(1 - 1/P) M bytes.
    """

    name = "naive"
    device_types = ("cpu", "gpu")

    def __init__(self, mpi_comm: Any = None, **options: Any) -> None:
        options.pop("bucket_bytes", None)
        super().__init__(mpi_comm, bucket_bytes=0, **options)

    def in_place_group(self) -> Group | None:
        return self.world_ring()

    def all_reduce_flat(self, buffer: FlatBuffer, op: str) -> None:
        steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
        self.start_steps(steps).wait()
