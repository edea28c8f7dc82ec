"""Moving arrays: every dtype, shape and layout arrives byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ranks import assert_all_ranks

from communicators import CommunicatorError

parallel = pytest.mark.parallel([1, 2, 3, 4])

DTYPES = [
    *"?bBhHiIqQefdgFDG",
    "M8[s]",
    "m8[ms]",
    "S3",
    "U2",
    ">f4",
    "i4,f8",
    "V3",
]
SHAPES = [(), (0,), (3, 0), (1,), (5,), (2, 3)]
LAYOUTS = {
    "c": lambda a: a,
    "fortran": np.asfortranarray,
    "strided": lambda a: np.concatenate([a, a])[:: 2 if a.ndim else 1][: len(a)],
    "reversed": lambda a: a[::-1],
}


def sample(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of random bytes that any rank can make for any other."""
    kind = np.dtype(dtype)
    n_elems = int(np.prod(shape))
    if kind.kind == "?":
        kind = np.dtype("u1")
    if kind.kind == "U":
        letters = np.array([chr(97 + (rank + i) % 26) for i in range(n_elems)], kind)
        return letters.reshape(shape)
    random = np.random.RandomState(1 + rank)
    data = random.randint(0, 2, n_elems * kind.itemsize).astype(np.uint8)
    return data.view(kind)[:n_elems].reshape(shape)


def same(a: object, b: np.ndarray) -> bool:
    """Tell whether two arrays have equal dtype, shape and bytes."""
    return (
        isinstance(a, np.ndarray)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.tobytes() == b.tobytes()
    )


@pytest.mark.reports("pytorch/pytorch#139178", "PPPLDeepLearning/plasma-python#15")
@parallel
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_arrives_byte_for_byte(flat, dtype):
    rank, size = flat.rank, flat.size
    for shape in SHAPES:
        mine = sample(rank, shape, dtype)
        all_of_them = [sample(r, shape, dtype) for r in range(size)]
        root = size - 1
        bad = []
        if not same(flat.bcast(mine, root=root), all_of_them[root]):
            bad.append("bcast")
        gathered = flat.gather(mine, root=root)
        if rank != root:
            bad += ["gather"] if gathered is not None else []
        elif not all(map(same, gathered, all_of_them)):
            bad.append("gather")
        if not all(map(same, flat.allgather(mine), all_of_them)):
            bad.append("allgather")
        rows = [sample(rank * size + r, shape, dtype) for r in range(size)]
        columns = [sample(r * size + rank, shape, dtype) for r in range(size)]
        if not all(map(same, flat.alltoall(rows), columns)):
            bad.append("alltoall")
        xs = tuple(all_of_them) if rank == root else None
        if not same(flat.scatter(xs, root=root), mine):
            bad.append("scatter")
        assert_all_ranks(flat, not bad, f"{bad} of shape {shape}")


@parallel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_memory_layout(comm, layout):
    mine = LAYOUTS[layout](np.arange(12.0).reshape(3, 4) + 100 * comm.rank)
    expected = [
        LAYOUTS[layout](np.arange(12.0).reshape(3, 4) + 100 * r)
        for r in range(comm.size)
    ]
    got = comm.allgather(mine)
    ok = all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    assert_all_ranks(comm, ok, f"{got}")
    got = comm.bcast(mine, root=comm.size - 1)
    assert_all_ranks(comm, np.array_equal(got, expected[-1]), f"{got}")


@parallel
def test_shapes_and_dtypes_may_differ_between_ranks(flat):
    got = flat.allgather(np.arange(flat.rank, dtype="f4" if flat.rank % 2 else "i2"))
    expected = [np.arange(r, dtype="f4" if r % 2 else "i2") for r in range(flat.size)]
    assert_all_ranks(flat, all(map(same, got, expected)), f"{got}")


@parallel
def test_tuples_travel_as_tuples(flat):
    mine = (np.full(2, flat.rank), np.array(0.5, "f2"))
    for got in (
        *flat.allgather(mine),
        flat.bcast(mine),
        *flat.alltoall([mine] * flat.size),
    ):
        ok = isinstance(got, tuple) and got[0].shape == (2,) and got[1] == 0.5
        assert_all_ranks(flat, ok, f"{got}")


@parallel
def test_an_array_with_a_row_a_rank_can_be_scattered(flat):
    table = np.arange(2.0 * flat.size).reshape(flat.size, 2)
    got = flat.scatter(table if flat.rank == 0 else None)
    assert_all_ranks(flat, np.array_equal(got, table[flat.rank]), f"{got}")


@parallel
def test_numpy_scalars_count_as_zero_dimensional(flat):
    got = flat.allgather(np.float32(flat.rank))
    ok = [float(x) for x in got] == list(range(flat.size)) and got[0].shape == ()
    assert_all_ranks(flat, ok, f"{got}")


@pytest.mark.reports("chainer/chainermn#265", "chainer/chainermn#267")
@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_send_and_recv_move_every_dtype(flat, dtype):
    last = flat.size - 1
    for shape in SHAPES:
        if flat.rank == 0:
            flat.send(sample(7, shape, dtype), last)
        ok = flat.rank != last or same(flat.recv(0), sample(7, shape, dtype))
        assert_all_ranks(flat, ok, f"shape {shape}")


@pytest.mark.parallel([2, 3])
def test_tags_and_tuples_of_messages(flat):
    ok = True
    if flat.rank == 0:
        flat.send((np.ones(3), np.zeros((2, 2))), 1, tag=5)
        flat.send(np.full(3, 9.0), 1, 6)
    if flat.rank == 1:
        second = flat.recv(0, 6)
        first = flat.recv(0, tag=5)
        ok = second[0] == 9 and isinstance(first, tuple) and first[1].shape == (2, 2)
    assert_all_ranks(flat, ok)


BAD_CALLS = {
    "a list in a tuple": lambda c, bad: c.allgather(([1],) if bad else np.ones(1)),
    "objects": lambda c, bad: c.bcast(np.array([None] if bad else [1]), root=1),
    "too few rows": lambda c, bad: c.alltoall([np.ones(1)] * (c.size - bad)),
    "no rows": lambda c, bad: c.scatter(np.array(1.0) if bad else None, root=1),
    "root": lambda c, bad: c.gather(np.ones(1), root=9 if bad else 0),
    "root differs": lambda c, bad: c.gather(np.ones(1), root=1 if bad else 0),
    "no array": lambda c, bad: c.allreduce(None if bad else np.ones(1)),
    "shape": lambda c, bad: c.allreduce(np.ones(3 + bad)),
    "dtype": lambda c, bad: c.allreduce(np.ones(3, "f4" if bad else "f8")),
    "op": lambda c, bad: c.allreduce(np.ones(3), "max" if bad else "sum"),
    "unknown op": lambda c, bad: c.allreduce(np.ones(3), "median" if bad else "sum"),
    "rows": lambda c, bad: c.reduce_scatter(np.ones((c.size + bad, 2))),
    "strings": lambda c, bad: c.allreduce(np.array(["a"])),
    "other call": lambda c, bad: c.barrier() if bad else c.allreduce(np.ones(1)),
    "objs": lambda c, bad: c.alltoall_obj([1] * (c.size + bad)),
    "lambda": lambda c, bad: c.bcast_obj((lambda: 0) if bad else 1, root=1),
    "gather lambda": lambda c, bad: c.gather_obj((lambda: 0) if bad else 1),
    "reduce strings": lambda c, bad: c.allreduce_obj("a" if bad else 1),
    "object op": lambda c, bad: c.allreduce_obj(1, "nonsense"),
    "masked": lambda c, bad: c.allreduce(np.ma.ones(1) if bad else np.ones(1)),
    "no root": lambda c, bad: c.gather_obj(1, root=None if bad else 0),
    "message size": lambda c, bad: c.bcast(np.ones(9), -1 if bad else None),
    "other size": lambda c, bad: c.bcast_obj(bytes(99), 8 if bad else 80),
    "key": lambda c, bad: c.split(0, "a" if bad else 0),
    "large color": lambda c, bad: c.split(2**40 if bad else 0, 0),
    "color": lambda c, bad: c.split(-7 if bad else 0, 0),
}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_on_one_rank_raises_on_all_and_they_stay_in_step(flat, case):
    # The root of some calls is rank 1, so that rank is the bad one.
    caught = None
    try:
        BAD_CALLS[case](flat, flat.rank == 1)
    except (CommunicatorError, TypeError, ValueError) as error:
        caught = error
    texts = flat.mpi_comm.allgather((type(caught).__name__, str(caught)))
    assert_all_ranks(flat, caught is not None, "no error")
    assert_all_ranks(flat, len(set(texts)) == 1, f"different errors: {texts}")
    total = flat.allreduce(np.ones(2))
    assert_all_ranks(flat, (total == flat.size).all(), "out of step")


@pytest.mark.parallel([2])
def test_bad_sends_raise_on_both_sides(flat):
    caught = []
    for call in (
        lambda: flat.send([1], 1) if flat.rank == 0 else flat.recv(0),
        lambda: flat.send_obj(lambda: 0, 1) if flat.rank == 0 else flat.recv_obj(0),
    ):
        try:
            call()
        except TypeError as error:
            caught.append(str(error))
    assert_all_ranks(flat, len(caught) == 2, f"{caught}")


@pytest.mark.parallel([2])
@pytest.mark.parametrize(
    "arguments", [(9, 0), (-7, 0), (0, -7), (0, 10**9), (0, 1.5), ("a", 0), (0, "x")]
)
def test_peers_and_tags_out_of_range_are_refused(flat, arguments):
    kinds = (ValueError, TypeError)
    for call in (flat.recv, flat.recv_obj):
        with pytest.raises(kinds, match="expected"):
            call(*arguments)
    with pytest.raises(kinds, match="expected"):
        flat.send(np.ones(1), *arguments)
