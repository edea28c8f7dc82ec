"""Packs and unpacks, and sends nothing."""

from __future__ import annotations

from communicators.base import CommunicatorBase
from communicators.dtypes import Array
from communicators.transports.progress import Finished, Handle


class DummyCommunicator(CommunicatorBase):
    """For measuring what a training step costs without communication.

    ``allreduce_arrays`` (gradients) packs, scales and unpacks each rank's own arrays;
    every other collective is real.
    """

    name = "dummy"

    def all_reduce_flat(self, buffer: Array, op: str) -> None:
        steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
        self.start_steps(steps).wait()

    def start_all_reduce_flat(self, buffer: Array, op: str) -> Handle:
        return Finished()
