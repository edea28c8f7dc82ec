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
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import FlatBuffer
from communicators.topology import coordinates

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase
    from communicators.transports.group import Group
    from communicators.transports.progress import Steps


def create_grid_groups(
    comm: CommunicatorBase, dims: Sequence[int], labels: Sequence[str] | None = None
) -> list[Group]:
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
        # On GPUs the links in the host work beside those between hosts.
        group = comm.create_group(label, color, own, lane=min(i, 1))
        assert group is not None
        groups.append(group)
    return groups


def grid_all_reduce(
    groups: Sequence[Group], buffer: FlatBuffer, op: str, tag: int
) -> Steps:
    """Reduce ``buffer`` in place over all ranks of the grid.

    Each part is added up on one rank at a time in a fixed order and then copied, so
    all ranks end with the same bits.

    Args:
        groups: one a dimension; see :func:`create_grid_groups`.
        buffer: a device buffer is divisible by the number of ranks.
        op: name of the reduction.
        tag: of the operation.
    Cost: sum of 2(p_i - 1) steps.
    """
    if isinstance(buffer, DeviceBuffer):
        parts = yield from _scatter(groups, buffer, op, tag)
        scattered = groups
    else:
        # The innermost reduce-scatter and all-gather together are an all-reduce, for
        # which two ranks have a shorter way.
        *scattered, last = groups
        with last.line_up() as place:
            parts = yield from _scatter(scattered, buffer, op, tag)
            yield [place]
            if parts[-1].size:
                yield from last.all_reduce(parts[-1], op, tag)
    for group, part in zip(reversed(scattered), reversed(parts[:-1]), strict=True):
        yield from group.all_gather(part, tag)


def _scatter(
    groups: Sequence[Group], buffer: FlatBuffer, op: str, tag: int
) -> Generator[Sequence[Any], None, list[Any]]:
    """Reduce-scatter along the dimensions; return the parts, the whole one first."""
    parts: list[Any] = [buffer]
    for group in groups:
        part = yield from group.reduce_scatter(parts[-1], op, tag)
        parts.append(part)
    return parts


def chunks_of(buffer: FlatBuffer, n_chunks: int, multiple: int = 1) -> list[Any]:
    """Cut a buffer into at most ``n_chunks`` nearly equal views, none empty.

    Args:
        buffer: of a device buffer the chunks have fences of their own, so operations
            on different chunks do not wait for each other.
        n_chunks: 1 or more.
        multiple: lengths of the chunks are multiples of it, if that of the buffer is.
    """
    n_units = buffer.size // multiple
    n = max(1, min(n_chunks, n_units))
    bounds = [n_units * i // n * multiple for i in range(n)] + [buffer.size]
    parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    if isinstance(buffer, DeviceBuffer):
        return [buffer.independent(part) for part in parts]
    return [buffer[part] for part in parts]


def issue_in_waves(operations: Sequence[Steps]) -> None:
    """Issue the NCCL calls of several chunks so that they overlap.

    In wave w chunk w makes its first call, chunk w-1 its second, and so on: while one
    chunk is reduced between hosts, the next is reduced in the host. All ranks issue in
    this one order, as NCCL demands of several communicators.

    Args:
        operations: steps that pause after each call and wait for nothing.
    Source: the pipelining of PowerAI DDL (US patent 11093438 B2 describes it).
    """
    waiting = list(operations)
    begun: list[Steps] = []
    while waiting or begun:
        if waiting:
            begun.append(waiting.pop(0))
        begun = [steps for steps in begun if _goes_on(steps)]


def _goes_on(steps: Steps) -> bool:
    for requests in steps:
        assert not requests
        return True
    return False
