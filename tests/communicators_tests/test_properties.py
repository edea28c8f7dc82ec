"""Array collectives on random shapes, dtypes, layouts, roots and operations."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.examples import in_step, laid_out, layouts, of_rank_0, shapes, values
from helpers.ranks import assert_all_ranks
from hypothesis import given
from hypothesis import strategies as st

parallel = pytest.mark.parallel([1, 2, 3])
DTYPES = ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", ">f4", "m8[s]"]
NUMBERS = ["i1", "u2", "i4", "i8", "f2", "f4", "f8"]
# Which reductions the engine has: NumPy's function, and whether mean divides it.
UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@st.composite
def tables(draw):
    """Draw a shape, dtype and layout for what each rank sends to each: 3 x 3."""
    cell = st.tuples(shapes(), st.sampled_from(DTYPES), layouts())
    return draw(st.lists(cell, min_size=9, max_size=9)), draw(st.integers(0, 2**20))


def table_of(drawn, size):
    """Return ``arrays[source][dest]``, equal on all ranks."""
    cells, seed = drawn
    return [
        [
            laid_out(
                values(seed + 9 * i + j, *cells[3 * i + j][:2]), cells[3 * i + j][2]
            )
            for j in range(size)
        ]
        for i in range(size)
    ]


def same(got, expected):
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and got.tobytes() == expected.tobytes()
    )


def all_same(got, expected):
    return len(got) == len(expected) and all(map(same, got, expected))


@parallel
@in_step(40)
@given(drawn=tables(), roots=st.integers(0, 11))
def test_arrays_arrive_as_they_are(flat, drawn, roots):
    rank, size = flat.rank, flat.size
    drawn, roots = of_rank_0(flat, drawn, roots)
    table = table_of(drawn, size)
    root = roots % size
    bad = []
    if not all_same(flat.alltoall(table[rank]), [row[rank] for row in table]):
        bad.append("alltoall")
    if not all_same(flat.allgather(table[rank][0]), [row[0] for row in table]):
        bad.append("allgather")
    gathered = flat.gather(table[rank][0], root=root)
    if rank == root and not all_same(gathered, [row[0] for row in table]):
        bad.append("gather")
    xs = table[root] if rank == root else None
    if not same(flat.scatter(xs, root=root), table[root][rank]):
        bad.append("scatter")
    if not same(flat.bcast(table[rank][0], root=root), table[root][0]):
        bad.append("bcast")
    assert_all_ranks(flat, not bad, f"{bad} of {drawn}, root {root}")


@pytest.mark.parallel([2, 3])
@in_step(40)
@given(drawn=tables(), is_tuple=st.booleans(), tag=st.integers(0, 15_999))
def test_messages_arrive_as_they_are(flat, drawn, is_tuple, tag):
    drawn, is_tuple, tag = of_rank_0(flat, drawn, is_tuple, tag)
    table = table_of(drawn, flat.size)
    message = tuple(table[0]) if is_tuple else table[0][0]
    ok = True
    if flat.rank == 0:
        flat.send(message, flat.size - 1, tag)
    if flat.rank == flat.size - 1:
        got = flat.recv(0, tag)
        ok = all_same(got, message) if is_tuple else same(got, message)
    assert_all_ranks(flat, ok, f"{drawn}")


@parallel
@in_step(50)
@given(
    shape=shapes(),
    dtype=st.sampled_from(NUMBERS),
    kinds=st.lists(layouts(), min_size=3, max_size=3),
    op=st.sampled_from([*UFUNCS, "mean"]),
    seed=st.integers(0, 2**20),
)
def test_reductions_equal_those_of_one_process(flat, shape, dtype, kinds, op, seed):
    size = flat.size
    shape, dtype, kinds, op, seed = of_rank_0(flat, shape, dtype, kinds, op, seed)
    shape = (size, *shape)
    arrays = [
        laid_out(values(seed + r, shape, dtype), kinds[r % len(kinds)])
        for r in range(size)
    ]
    # Sums and products of three numbers below 4 fit into every dtype, exactly.
    expected = UFUNCS["sum" if op == "mean" else op].reduce(arrays, dtype=dtype)
    if op == "mean":
        kind = dtype if dtype.startswith("f") else "f8"
        wide = "f4" if kind == "f2" else kind
        expected = (expected.astype(wide) / size).astype(kind)
    whole = flat.allreduce(arrays[flat.rank], op)
    block = flat.reduce_scatter(arrays[flat.rank], op)
    ok = same(whole, expected) and same(block, expected[flat.rank])
    assert_all_ranks(flat, ok, f"{op} of {dtype} {shape}: {whole}, {block}")
