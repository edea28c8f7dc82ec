"""Objects of any kind and size."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ranks import assert_all_ranks

from communicators import RankFailedError
from communicators.transports import mpi

OBJECTS = [None, 0, "text", {"a": [1, (2, None)]}, b"", np.arange(3), {1, 2}]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("index", range(len(OBJECTS)))
def test_objects_arrive_equal(flat, index):
    obj, size, rank = OBJECTS[index], flat.size, flat.rank
    root = size - 1

    def equal(got: object) -> bool:
        return type(got) is type(obj) and bool(np.all(got == obj))

    bad = []
    if not equal(flat.bcast_obj(obj if rank == root else "other", root=root)):
        bad.append("bcast_obj")
    if not all(map(equal, flat.allgather_obj(obj))):
        bad.append("allgather_obj")
    gathered = flat.gather_obj((rank, obj), root=root)
    if rank != root and gathered is not None:
        bad.append("gather_obj elsewhere")
    if rank == root and [r for r, _ in gathered] != list(range(size)):
        bad.append("gather_obj")
    scattered = flat.scatter_obj(
        [(r, obj) for r in range(size)] if rank == root else None, root=root
    )
    if scattered[0] != rank or not equal(scattered[1]):
        bad.append("scatter_obj")
    rows = flat.alltoall_obj([(rank, r) for r in range(size)])
    if rows != [(r, rank) for r in range(size)]:
        bad.append("alltoall_obj")
    if size > 1:
        if rank == 0:
            flat.send_obj(obj, 1, tag=index)
        if rank == 1 and not equal(flat.recv_obj(0, tag=index)):
            bad.append("send_obj")
    assert_all_ranks(flat, not bad, f"{bad} of {obj!r}")


@pytest.mark.reports(
    "chainer/chainermn#111", "litebird/litebird_sim#257", "markusschmitt/vmc_jax#87"
)
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("n_bytes", [0, 1, 900, 1000, 1100, 10_000])
def test_objects_longer_than_one_message(monkeypatch, flat, n_bytes):
    # The same cuts that a 2 GiB pickle needs, at 1000 bytes.
    monkeypatch.setattr(mpi, "MAX_MESSAGE_BYTES", 1000)
    obj = bytes(range(256)) * 40
    obj = obj[:n_bytes]
    bad = []
    if flat.bcast_obj(obj, max_buf_len=1000) != obj:
        bad.append("bcast_obj")
    if flat.allgather_obj(obj) != [obj] * flat.size:
        bad.append("allgather_obj")
    if flat.gather_obj(obj) not in (None, [obj] * flat.size):
        bad.append("gather_obj")
    if flat.scatter_obj([obj] * flat.size) != obj:
        bad.append("scatter_obj")
    if flat.alltoall_obj([obj] * flat.size) != [obj] * flat.size:
        bad.append("alltoall_obj")
    if flat.allreduce_obj([obj]) != [obj] * flat.size:
        bad.append("allreduce_obj")
    if flat.rank == 0:
        flat.send_obj(obj, 1)
    if flat.rank == 1 and flat.recv_obj(0) != obj:
        bad.append("send_obj")
    array = np.frombuffer(obj, "u1")
    if not all(np.array_equal(a, array) for a in flat.allgather(array)):
        bad.append("allgather")
    if not np.array_equal(flat.allreduce(array, "max"), array):
        bad.append("allreduce")
    assert_all_ranks(flat, not bad, f"{bad}")


@pytest.mark.parallel([3])
def test_reductions_combine_neighbours_in_rank_order(flat):
    got = flat.allreduce_obj([flat.rank])
    assert_all_ranks(flat, got == [0, 1, 2], f"{got}")
    got = flat.allreduce_obj(f"{flat.rank}", op=lambda a, b: a + "-" + b)
    assert_all_ranks(flat, got == "0-1-2", f"{got}")


@pytest.mark.parallel([2, 3])
def test_nan_wins_in_object_max(flat):
    got = flat.allreduce_obj(float("nan") if flat.rank == 1 else 1.0, "max")
    assert_all_ranks(flat, got != got, f"{got}")


class Touchy:
    """Combines on no rank but pickles everywhere."""

    def __add__(self, other: object) -> object:
        raise RuntimeError("cannot be added")


class Unloadable:
    """Pickles, but does not come back."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("not a number",))


@pytest.mark.parallel([2, 3])
def test_a_failing_combination_raises_on_all(flat):
    with pytest.raises(RankFailedError, match="cannot be added"):
        flat.allreduce_obj(Touchy())
    flat.barrier()


@pytest.mark.parallel([2, 3])
def test_a_failing_load_raises_on_all(flat):
    for call in (flat.bcast_obj, flat.allgather_obj, flat.gather_obj):
        with pytest.raises(TypeError, match="not a number"):
            call(Unloadable())
    flat.barrier()


@pytest.mark.parallel([2])
def test_an_error_names_the_part_that_cannot_be_pickled(flat):
    obj = {"transform": [lambda: 0]}
    with pytest.raises(TypeError, match=r"rank 0.*\['transform'\]\[0\] \(function\)"):
        flat.bcast_obj(obj if flat.rank == 0 else None)
    flat.barrier()
