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
DEFAULT_N_CHUNKS = 4


class MultiRingCommunicator(CommunicatorBase):
    """Reduces along dims[0], dims[1], ... and back. For big or uneven networks.

    A buffer is cut into chunks: while one is on the network, another is being reduced
    in the host, so the links of two dimensions work at the same time.

    Args:
        mpi_comm: as in :class:`CommunicatorBase`.
        dims: factors of the number of ranks, as ``(4, 2, 2)`` or ``"4x2x2"``; ``None``
            for (ranks a host, prime factors of the number of hosts), which needs
            hosts of equal size.
        n_chunks: most chunks of one buffer; chunks are at least 256 KiB.
        options: as in :class:`CommunicatorBase`.

    Raises:
        TopologyError: the product of ``dims`` is not the number of ranks, or no
            ``dims`` and hosts with different numbers of ranks.
        ValueError: ``n_chunks`` below 1.
    Cost: 2(p_i - 1) steps in dimension i; each rank sends
        2(1 - 1/p_i) M / (p_0 ... p_{i-1}) bytes there.
    """

    name = "multi_ring"
    device_types = ("cpu", "gpu")

    def __init__(
        self,
        mpi_comm: Any = None,
        *,
        dims: str | Sequence[int] | None = None,
        n_chunks: int = DEFAULT_N_CHUNKS,
        **options: Any,
    ) -> None:
        super().__init__(mpi_comm, **options)
        self.n_chunks = n_chunks
        self.dims: tuple[int, ...] = ()
        error: Exception | None = None
        try:
            if not isinstance(n_chunks, int) or n_chunks < 1:
                raise ValueError(f"n_chunks {n_chunks!r}: expected 1 or more")
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
        n = max(1, min(self.n_chunks, buffer.nbytes // MIN_CHUNK_BYTES))
        on_device = isinstance(buffer, DeviceBuffer)
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
