"""Ranks that compare every collective with NumPy, bit by bit."""

from __future__ import annotations

import functools
import time

import numpy as np

from nccl_emulator.library import OPERATORS, TYPES, Communicator
from nccl_emulator.ranks import Ranks

#: Elements per rank: none, one, odd, several chunks of 1024 bytes and a bit more.
COUNTS = [0, 1, 7, 2049]
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter"]
MOVES = ["broadcast", "bcast", "all_gather"]


@functools.lru_cache(maxsize=1024)
def make_input(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return the array of a rank, read-only: any integers, floats around zero."""
    random = np.random.default_rng([rank, count, dtype.num])
    if dtype.kind in "iu":
        data = random.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    else:
        data = random.normal(0, 2, count).astype(np.float32).astype(dtype)
    data.flags.writeable = False
    return data


def reduced(inputs: list[np.ndarray], op: str) -> np.ndarray:
    """Return what the emulator promises: in the order of the ranks, rounded once."""
    dtype = inputs[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    functions = {"max": np.fmax, "min": np.fmin, "prod": np.multiply}
    total = inputs[0].astype(wide)
    for other in inputs[1:]:
        total = functions.get(op, np.add)(total, other.astype(wide))
    if op == "avg" and dtype.kind in "iu":
        # NumPy rounds down, C towards zero.
        quotient, rest = np.divmod(total, dtype.type(len(inputs)))
        total = quotient + ((rest != 0) & (total < 0))
    elif op == "avg":
        total = total / wide.type(len(inputs))
    return total.astype(dtype)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, what: object) -> None:
    """Compare two arrays of one dtype, signs of zeros and NaNs included."""
    assert found.dtype == expected.dtype, what
    found_bytes, expected_bytes = found.tobytes(), expected.tobytes()
    assert found_bytes == expected_bytes, (what, found, expected)


def _guarded(count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return an array inside a larger one whose ends nobody may write."""
    whole = np.full((count + 4) * dtype.itemsize, 0xA5, np.uint8).view(dtype)
    return whole, whole[2 : count + 2]


def _assert_guarded(whole: np.ndarray, what: object) -> None:
    ends = np.concatenate([whole[:2], whole[-2:]]).view(np.uint8)
    assert (ends == 0xA5).all(), what


def check_reduction(
    comm: Communicator, name: str, count: int, dtype, op: str, in_place: bool, root: int
) -> None:
    """Run one reduction and compare what this rank gets."""
    rank, size = comm.rank, comm.size
    what = (name, count, dtype, op, in_place, root, rank, size)
    blocks = size if name == "reduce_scatter" else 1
    inputs = [make_input(r, count * blocks, dtype) for r in range(size)]
    whole, send = _guarded(count * blocks, dtype)
    send[:] = inputs[rank]
    block = slice(rank * count, (rank + 1) * count) if blocks > 1 else slice(None)
    whole_recv, recv = (whole, send[block]) if in_place else _guarded(count, dtype)
    if name == "all_reduce":
        comm.all_reduce(send, recv, op)
    elif name == "reduce":
        comm.reduce(send, recv, op, root)
    else:
        comm.reduce_scatter(send, recv, op)
    if name != "reduce" or rank == root:
        assert_same_bits(recv, reduced(inputs, op)[block], what)
    if not in_place:
        assert_same_bits(send, inputs[rank], what)
    if name == "reduce" and rank != root and not in_place:
        assert (recv.view(np.uint8) == 0xA5).all(), what
    _assert_guarded(whole, what)
    _assert_guarded(whole_recv, what)


def check_move(
    comm: Communicator, name: str, count: int, dtype, in_place: bool, root: int
) -> None:
    """Run one collective without arithmetic and compare what this rank gets."""
    rank, size = comm.rank, comm.size
    what = (name, count, dtype, in_place, root, rank, size)
    inputs = [make_input(r, count, dtype) for r in range(size)]
    blocks = size if name == "all_gather" else 1
    whole, recv = _guarded(count * blocks, dtype)
    block = slice(rank * count, (rank + 1) * count) if blocks > 1 else slice(None)
    send = recv[block] if in_place else inputs[rank].copy()
    send[:] = inputs[rank]
    if name == "broadcast":
        comm.broadcast(send, recv, root)
    elif name == "bcast":
        recv[:] = inputs[rank]
        comm.bcast(recv, root)
    else:
        comm.all_gather(send, recv)
    expected = np.concatenate(inputs) if blocks > 1 else inputs[root]
    assert_same_bits(recv, expected, what)
    _assert_guarded(whole, what)


def every_reduction(ranks: Ranks, name: str, counts=COUNTS, types=TYPES) -> int:
    """Try all types, operators and lengths, in place and out of place."""
    comm = ranks.join()
    n_checks = 0
    for count in counts:
        for dtype in types:
            for op in OPERATORS:
                for in_place in (False, True):
                    root = n_checks % comm.size
                    check_reduction(comm, name, count, dtype, op, in_place, root)
                    n_checks += 1
    comm.destroy()
    return n_checks


def every_move(ranks: Ranks, name: str) -> None:
    """Try all types and lengths, in place and out of place, from every root."""
    comm = ranks.join()
    for count in COUNTS:
        for dtype in TYPES:
            for in_place in (False, True):
                for root in range(comm.size if name != "all_gather" else 1):
                    check_move(comm, name, count, dtype, in_place, root)
    comm.destroy()


def every_half(ranks: Ranks) -> None:
    """All 65,536 values of the 16-bit types, added to themselves, zero, and halved."""
    comm = ranks.join()
    for dtype in (TYPES[6], TYPES[9]):
        values = np.arange(65536, dtype=np.uint16).view(dtype)
        first = values if comm.rank == 0 else np.zeros_like(values)
        pairs = np.random.default_rng(1).permutation(values) if comm.rank else values
        for op, own in [
            ("sum", first),
            ("sum", pairs),
            ("prod", pairs),
            ("avg", pairs),
        ]:
            recv = np.empty_like(own)
            gathered = np.empty(comm.size * own.size, dtype)
            comm.all_reduce(own, recv, op)
            comm.all_gather(own, gathered)
            with np.errstate(all="ignore"):
                expected = reduced(list(gathered.reshape(comm.size, -1)), op)
            is_nan = np.isnan(expected)
            assert np.isnan(recv[is_nan]).all()
            assert_same_bits(recv[~is_nan], expected[~is_nan], (dtype, op))
    comm.destroy()


def not_numbers(ranks: Ranks) -> None:
    """NaN loses in max and min, and stays in sums; infinities behave."""
    comm = ranks.join()
    for dtype in TYPES[6:]:
        nan, inf = dtype.type(np.nan), dtype.type(np.inf)
        rows = np.array([[nan, 1, nan, inf, -inf], [2, nan, nan, 1, inf]], dtype)
        own = rows[comm.rank].copy()
        recv = np.empty_like(own)
        expected = {
            "max": [2, 1, nan, inf, inf],
            "min": [2, 1, nan, 1, -inf],
            "sum": [nan, nan, nan, inf, nan],
        }
        for op, values in expected.items():
            comm.all_reduce(own, recv, op)
            wanted = np.array(values, dtype)
            np.testing.assert_array_equal(recv.astype(float), wanted.astype(float))
    comm.destroy()


def large(ranks: Ranks, n_elems: int) -> float:
    """Reduce an array of many default chunks; return the seconds of the best of 3."""
    comm = ranks.join()
    own = np.arange(n_elems, dtype=np.float32) % 251 + comm.rank
    best_s = np.inf
    for _ in range(3):
        array = own.copy()
        ranks.barrier()
        start = time.monotonic()
        comm.all_reduce(array, array)
        best_s = min(best_s, time.monotonic() - start)
    expected = sum(
        np.arange(n_elems, dtype=np.float32) % 251 + r for r in range(comm.size)
    )
    assert_same_bits(array, expected, "large")
    comm.destroy()
    return best_s


def beyond_32_bits(ranks: Ranks) -> None:
    """A count that does not fit 32 bits, signed: offsets must not, either."""
    comm = ranks.join()
    array = np.zeros(2**31 + 5, np.int8)
    array[[0, -1]] = 3, 5
    comm.all_reduce(array, array)
    assert (array[0], array[1], array[-2], array[-1]) == (3, 0, 0, 5)
    comm.destroy()


def random_calls(ranks: Ranks, n_rounds: int, seed: int) -> None:
    """Random operations on three communicators, with random delays on each rank.

    The choice of a round is the same on all ranks; the delays are not.
    """
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, ranks.rank])
    world = ranks.join()
    halves = world.split(ranks.rank % 2, -ranks.rank)
    reverse = world.split(0, -ranks.rank)
    for _ in range(n_rounds):
        if own.random() < 0.3:
            time.sleep(own.exponential(0.0005))
        comm = (world, halves, reverse)[common.integers(3)]
        # A number that means the same on all ranks, whatever the communicator.
        choice, root = common.integers(8), int(common.integers(12)) % comm.size
        count = int(common.choice([0, 1, 3, 500, 5000]))
        dtype, op = TYPES[common.integers(10)], OPERATORS[common.integers(5)]
        in_place = bool(common.integers(2))
        if choice < 3:
            name = REDUCTIONS[choice]
            check_reduction(comm, name, count, dtype, op, in_place, root)
        elif choice < 6:
            check_move(comm, MOVES[choice - 3], count, dtype, in_place, root)
        elif choice == 6:
            _check_ring(ranks, comm, count, dtype)
        else:
            _check_all_at_once(ranks, [world, halves, reverse], count, own)
    for comm in (reverse, halves, world):
        comm.destroy()


def _check_ring(ranks: Ranks, comm: Communicator, count: int, dtype) -> None:
    """Send to the next rank and receive from the one before, in one group."""
    send, recv = make_input(comm.rank, count, dtype), np.empty(count, dtype)
    source = (comm.rank - 1) % comm.size
    with ranks.library.group():
        comm.send(send, (comm.rank + 1) % comm.size)
        comm.recv(recv, source)
    assert_same_bits(recv, make_input(source, count, dtype), "ring")


def _check_all_at_once(
    ranks: Ranks, comms: list[Communicator], count: int, own
) -> None:
    """Reduce on several communicators in one group, in an order of each rank's own."""
    arrays = [np.full(count, comm.rank + 1, np.int32) for comm in comms]
    with ranks.library.group():
        for index in own.permutation(len(comms)):
            comms[index].all_reduce(arrays[index], arrays[index])
    for comm, array in zip(comms, arrays, strict=True):
        assert (array == comm.size * (comm.size + 1) // 2).all()
