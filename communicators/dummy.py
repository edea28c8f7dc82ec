"""Packs and unpacks, and sends nothing."""

from __future__ import annotations

from communicators.base import CommunicatorBase
from communicators.devices.device import FlatBuffer
from communicators.transports.progress import Finished, Handle


class DummyCommunicator(CommunicatorBase):
    """For measuring what a training step costs without communication.

    ``allreduce_arrays`` (gradients) packs, scales and unpacks each rank's own arrays;
    every other collective is real.
    """

    name = "dummy"
    device_types = ("cpu", "gpu")

    def all_reduce_flat(self, buffer: FlatBuffer, op: str) -> None:
        steps = self.world_ring().all_reduce(buffer, op, self.next_tag())
        self.start_steps(steps).wait()

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        return Finished()
