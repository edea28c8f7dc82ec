"""Data of which each host has one copy, for all of its ranks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import communicators
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.packing import Packed, layout, unpack
from communicators import CommunicatorBase
from communicators.arguments import check_root

_LARGE_BYTES = 64 * 1024 * 1024


def share_in_host(comm: Any, data: Any, root: int | None = None) -> Any:
    """Give all ranks the same arrays, of which each host has one copy. Collective.

    For data sets in memory that every rank needs whole: 36 ranks on a host hold them
    once. The contiguous NumPy arrays in ``data`` are shared, wherever they are: it may
    be an array, a list, tuple or dictionary of arrays, Chainer's ``TupleDataset`` or
    ``DictDataset``, or any object that can be pickled. What is no array (and arrays of
    Python objects) each rank gets as a copy.

    The machine decides on who shares, never a pretended topology. The arrays cannot be
    written to. The memory is freed when no rank of the host holds any of them; the rank
    that gave ``data`` keeps its own copy for as long as it holds that.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py.
        data: what is shared; looked at on the ranks that give it.
        root: the rank whose data go to all hosts; ``None``: the data of the first rank
            of each host, which has read them itself, stay there.

    Returns:
        An object equal to ``data``, with read-only arrays.

    Raises:
        TypeError: the data cannot be pickled; on all ranks.
        ValueError: no such root; on all ranks.
        OSError: a host has not so much memory; on all ranks.
        UnavailableError: the system has no such memory; on all ranks.
        MismatchError: the ranks gave different roots.
    """
    with engine_of(comm) as engine:
        hosts = engine.allgather_obj(engine.real_host)
        giver = hosts.index(engine.real_host) if root is None else root
        packed, error = None, None
        try:
            if root is not None:
                check_root(root, engine.size, "share_in_host")
            if engine.rank == giver:
                packed = Packed(data, "share_in_host")
                _warn_if_little_is_shared(packed, data, engine.size)
        except Exception as failure:
            error = failure
        engine.agree("share_in_host", f"root={root}", error)
        # It can be split among hosts whatever ``comm`` can do.
        plain = communicators.create_communicator(
            "naive",
            engine.mpi_comm,
            topology=engine.topology,
            timeout_s=engine.timeout_s,
        )
        try:
            return _share(plain, packed, hosts, root)
        finally:
            # All ranks return, or all raise the same.
            plain.finalize()


def _share(
    engine: CommunicatorBase, packed: Packed | None, hosts: list[int], root: int | None
) -> Any:
    head, sizes = _heads(engine, packed, root)
    memory = engine.allocate_on_host(layout(sizes)[1])
    if packed is not None:
        packed.write_arrays(memory)
    if root is not None and len(set(hosts)) > 1:
        _to_other_hosts(engine, hosts, memory, root)
    # After that all ranks may read.
    engine.barrier()
    error = None
    try:
        shared = unpack(head, sizes, memory, read_only=True)
    except Exception as failure:
        error = TypeError(
            f"rank {engine.rank} cannot unpickle the data "
            f"({type(failure).__name__}: {failure})"
        )
    engine.agree("share_in_host, the data", error=error)
    return shared


def _heads(
    engine: CommunicatorBase, packed: Packed | None, root: int | None
) -> tuple[np.ndarray, list[int]]:
    """Give each rank its giver's pickle, and the sizes of the arrays beside it."""
    parts = None
    if packed is not None:
        parts = packed.head, np.array(packed.sizes, np.int64)
    if root is not None:
        head, sizes = engine.bcast(parts, root=root)
    else:
        host = engine.split(engine.real_host, engine.rank)
        assert host is not None
        with host:
            head, sizes = host.bcast(parts, root=0)
    return head, sizes.tolist()


def _to_other_hosts(
    engine: CommunicatorBase, hosts: list[int], memory: np.ndarray, root: int
) -> None:
    """Copy the memory of the root's host into that of the others, one rank a host."""
    here = engine.real_host
    speaker = root if here == hosts[root] else hosts.index(here)
    # The root is first, whatever its rank.
    speakers = engine.split(
        0 if engine.rank == speaker else None, 0 if engine.rank == root else 1
    )
    if speakers is not None:
        with speakers:
            speakers.bcast_arrays([memory], root=0)


def _warn_if_little_is_shared(packed: Packed, data: Any, size: int) -> None:
    if size > 1 and packed.head.size > max(_LARGE_BYTES, packed.nbytes):
        warnings.warn(
            f"share_in_host: {packed.head.size / 1e6:.0f} MB of this "
            f"{type(data).__name__} are no contiguous NumPy arrays, and are copied to "
            f"each of {size} ranks",
            stacklevel=3,
        )
