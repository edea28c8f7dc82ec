"""Try every array collective of the named communicators against closed forms.

Names may carry dimensions: ``multi_ring:2x2``. Reports for each rank ``{name:
verdict}``: ``"ok"``, which results were wrong, or the class and text of the error that
the communicator raised.
"""

import sys

import numpy as np
from mpi4py import MPI
from report import print_by_rank

from communicators import CommunicatorError, create_communicator

KINDS = ((0, "float32"), (1, "float16"), (7, "int64"), (70_001, "float32"))
SHAPES = ((), (1,), (3, 5), (257, 129))


def _wrong_collectives(comm, n_elems: int, dtype: str) -> list[str]:
    rank, size = comm.rank, comm.size
    x = np.full(n_elems, rank + 1, dtype)
    ones = np.ones(n_elems, dtype)
    total = size * (size + 1) // 2
    everyone = [ones * (r + 1) for r in range(size)]

    def equal(got, expected) -> bool:
        if isinstance(expected, list):
            pairs = zip(got, expected, strict=True)
            return all(equal(g, e) for g, e in pairs)
        return got.dtype == expected.dtype and np.array_equal(got, expected)

    results = {
        "allreduce sum": (comm.allreduce(x), ones * total),
        "allreduce max": (comm.allreduce(x, "max"), ones * size),
        "allreduce min": (comm.allreduce(x, "min"), ones),
        "allgather": (list(comm.allgather(x)), everyone),
        "bcast": (comm.bcast(x if rank == 1 else None, root=1), ones * 2),
        "alltoall": (
            list(comm.alltoall([ones * (10 * rank + r) for r in range(size)])),
            [ones * (10 * r + rank) for r in range(size)],
        ),
        "scatter": (
            comm.scatter(everyone if rank == size - 1 else None, root=size - 1),
            ones * (rank + 1),
        ),
        "reduce_scatter": (
            comm.reduce_scatter(np.stack([x * (r + 1) for r in range(size)])),
            ones * (total * (rank + 1)),
        ),
    }
    gathered = comm.gather(x, root=0)
    if rank == 0:
        results["gather"] = (list(gathered), everyone)
    # From host to host and inside: each sends to the next, the last to the first.
    if rank == 0:
        comm.send(x, 1, tag=3)
        received = comm.recv(size - 1, tag=3)
    else:
        received = comm.recv(rank - 1, tag=3)
        comm.send(x, (rank + 1) % size, tag=3)
    results["send, recv"] = (received, ones * ((rank - 1) % size + 1))
    return [
        f"{operation} of {n_elems} {dtype}"
        for operation, (got, expected) in results.items()
        if not equal(got, expected)
    ]


def _wrong_means(comm) -> list[str]:
    dtypes = ("float32", "float64", "float16")
    kinds = [(shape, dtype) for shape in SHAPES for dtype in dtypes]
    arrays = [np.full(shape, comm.rank + 1, dtype) for shape, dtype in kinds]
    reduced = comm.allreduce_arrays(arrays, op="mean")
    mean = (comm.size + 1) / 2
    return [
        f"mean of {shape} {dtype}"
        for (shape, dtype), given, got in zip(kinds, arrays, reduced, strict=True)
        if got is not given
        or got.dtype != dtype
        # 1/size is not a binary number on three ranks.
        or not np.allclose(got.astype("float64"), mean, rtol=4 * np.finfo(dtype).eps)
    ]


def _verdict(wanted: str) -> str:
    name, _, dims = wanted.partition(":")
    options = {"dims": dims} if dims else {}
    try:
        with create_communicator(name, timeout_s=20, **options) as comm:
            wrong = [
                text
                for n_elems, dtype in KINDS
                for text in _wrong_collectives(comm, n_elems, dtype)
            ]
            wrong += _wrong_means(comm)
    except CommunicatorError as error:
        return f"{type(error).__name__}: {error}"
    return "wrong: " + ", ".join(wrong) if wrong else "ok"


print_by_rank(MPI.COMM_WORLD, {name: _verdict(name) for name in sys.argv[1:]})
