"""Rings along every dimension of a grid, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from communicators.base import CommunicatorBase
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import FlatBuffer
from communicators.errors import TopologyError
from communicators.grid import (
    chunks_of,
    create_grid_groups,
    grid_all_reduce,
    issue_in_waves,
)
from communicators.topology import default_dims, parse_dims
from communicators.transports.progress import Finished, Handle

if TYPE_CHECKING:
    from communicators.transports.group import Group

#: Below this size a chunk's latency costs more than its overlap gains.
MIN_CHUNK_BYTES = 256 * 1024
#: Of device buffers.
DEFAULT_N_CHUNKS = 4
#: Of host buffers, of which several are in flight anyhow: on two hosts of two ranks,
#: links of 1 Gbit/s, buckets of 4 MiB took in chunks of 1 MiB 0.94 to 0.99 times as
#: long as whole for 16 MiB, and 0.99 to 1.01 times for ResNet-50's gradients.
HOST_CHUNK_BYTES = 4 * 1024 * 1024
#: More would not be told apart when they are in flight.
MAX_CHUNKS = 64


def number_of_chunks(nbytes: int, n_chunks: int | None, *, on_device: bool) -> int:
    """Return into how many chunks a buffer is cut.

    Args:
        nbytes: of the buffer.
        n_chunks: the communicator's option.
        on_device: whether the buffer is in a device's memory.
    """
    most, least = n_chunks or DEFAULT_N_CHUNKS, MIN_CHUNK_BYTES
    if n_chunks is None and not on_device:
        most, least = MAX_CHUNKS, HOST_CHUNK_BYTES
    return max(1, min(most, MAX_CHUNKS, nbytes // least))


class MultiRingCommunicator(CommunicatorBase):
    """Reduces along dims[0], dims[1], ... and back. For big or uneven networks.

    A buffer is cut into chunks: while one is on the network, another is being reduced
    in the host, so the links of two dimensions work at the same time.

    Args:
        mpi_comm: as in :class:`CommunicatorBase`.
        dims: factors of the number of ranks, as ``(4, 2, 2)`` or ``"4x2x2"``; ``None``
            for (ranks a host, prime factors of the number of hosts), which needs
            hosts of equal size.
        n_chunks: most chunks of one buffer, 1 to 64; chunks are at least 256 KiB.
            ``None``: 4 on GPUs; in host memory as many as have 4 MiB.
        options: as in :class:`CommunicatorBase`.

    Raises:
        TopologyError: the product of ``dims`` is not the number of ranks, or no
            ``dims`` and hosts with different numbers of ranks.
        ValueError: ``n_chunks`` below 1 or above 64.
    Cost: 2(p_i - 1) steps in dimension i; each rank sends
        2(1 - 1/p_i) M / (p_0 ... p_{i-1}) bytes there.
    """

    name = "multi_ring"
    device_types = ("cpu", "gpu")
    reduces_by_world_ring = False

    def __init__(
        self,
        mpi_comm: Any = None,
        *,
        dims: str | Sequence[int] | None = None,
        n_chunks: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(mpi_comm, **options)
        self.n_chunks = n_chunks
        self.dims: tuple[int, ...] = ()
        error: Exception | None = None
        try:
            is_number = isinstance(n_chunks, int) and 1 <= n_chunks <= MAX_CHUNKS
            if n_chunks is not None and not is_number:
                raise ValueError(f"n_chunks {n_chunks!r}: expected 1 to {MAX_CHUNKS}")
            if dims is None:
                self.dims = default_dims(self.topology)
            else:
                self.dims = parse_dims(dims, self.size)
        except TopologyError as failure:
            error = TopologyError(f"multi_ring: {failure}")
        except (TypeError, ValueError) as failure:
            error = ValueError(f"multi_ring: {failure}")
        details = f"dims {self.dims}, n_chunks {n_chunks}"
        self.agree("create multi_ring", details, error=error)
        self._groups_by_dim = create_grid_groups(self, self.dims)

    def in_place_group(self) -> Group | None:
        return self._groups_by_dim[0] if len(self.dims) == 1 else None

    @property
    def buffer_parts(self) -> int:
        return self.size

    @property
    def options(self) -> dict[str, Any]:
        # A part of the ranks has other factors, so it takes its own default.
        return {**super().options, "n_chunks": self.n_chunks}

    def options_for(self, members: Sequence[int]) -> dict[str, Any]:
        options = super().options_for(members)
        if list(members) == list(range(self.size)):
            options["dims"] = self.dims
        return options

    def start_all_reduce_flat(self, buffer: FlatBuffer, op: str) -> Handle:
        on_device = isinstance(buffer, DeviceBuffer)
        n = number_of_chunks(buffer.nbytes, self.n_chunks, on_device=on_device)
        operations = [
            grid_all_reduce(self._groups_by_dim, chunk, op, self.next_tag())
            for chunk in chunks_of(buffer, n, self.size if on_device else 1)
        ]
        if on_device:
            issue_in_waves(operations)
            return Finished()
        return _All([self.start_steps(steps) for steps in operations])


class _All:
    """The handle of several operations."""

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
