"""Reducing over a grid of ranks, one dimension after the other.

Factor the P ranks into dimensions p_0 x p_1 x ...: reduce-scatter along dimension
0, 1, ... on ever smaller parts, then all-gather in the reverse order. All rings of a
dimension run at the same time. In dimension i each rank sends
2(1 - 1/p_i) M / (p_0 ... p_{i-1}) bytes of a buffer of M bytes.

Source: Cho, Finkler, Serrano, Kung and Hunter, "BlueConnect", MLSys 2019; the
multi-ring pattern of PowerAI DDL (arXiv 1708.02188).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from communicators.dtypes import Array
from communicators.topology import coordinates

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase
    from communicators.transports.mpi import MpiTransport
    from communicators.transports.progress import Steps


def create_grid_groups(
    comm: CommunicatorBase, dims: Sequence[int], labels: Sequence[str] | None = None
) -> list[MpiTransport]:
    """Make this rank's group of each dimension. Collective.

    The ranks are placed host by host, dimension 0 fastest: with ``dims[0]`` ranks on
    each host, the neighbours along dimension 0 share a host.

    Args:
        comm: communicator whose ranks form the grid.
        dims: factors with product ``comm.size``.
        labels: names for counters; ``dim0``, ``dim1``, ... by default.
    """
    place = coordinates(comm.topology.position(comm.rank), dims)
    groups = []
    for i, own in enumerate(place):
        color = 0
        for j, (digit, p) in enumerate(zip(place, dims, strict=True)):
            if j != i:
                color = color * p + digit
        label = labels[i] if labels else f"dim{i}"
        group = comm.create_group(label, color, own)
        assert group is not None
        groups.append(group)
    return groups


def grid_all_reduce(
    groups: Sequence[MpiTransport], buffer: Array, op: str, tag: int
) -> Steps:
    """Reduce ``buffer`` in place over all ranks of the grid.

    Each part is added up on one rank at a time in a fixed order and then copied, so
    all ranks end with the same bits.

    Cost: sum of 2(p_i - 1) steps.
    """
    parts = [buffer]
    for group in groups:
        part = yield from group.reduce_scatter(parts[-1], op, tag)
        parts.append(part)
    for group, part in zip(reversed(groups), reversed(parts[:-1]), strict=True):
        yield from group.all_gather(part, tag)


def chunks_of(buffer: Array, n_chunks: int) -> list[Array]:
    """Cut a buffer into at most ``n_chunks`` nearly equal views, none empty."""
    n = max(1, min(n_chunks, buffer.size))
    bounds = [buffer.size * i // n for i in range(n + 1)]
    return [buffer[a:b] for a, b in itertools.pairwise(bounds)]
