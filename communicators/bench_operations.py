"""The operations that a bench times: their arrays, calls and expected results.

Element i of array k of rank r is ``(1 + (i + 7 k) % 31) * (1 + r % 8)`` before the
first call: small integers, which every dtype has exactly, and which tell elements,
arrays and ranks apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from communicators.base import CommunicatorBase
from communicators.dtypes import Array
from communicators.transports import load

_PERIOD = 31
_N_FACTORS = 8
#: Elements that are compared at once: whole periods, few enough to need no memory.
_BLOCK = _PERIOD * 16384

_EPSILON = {
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}


class WrongResultError(RuntimeError):
    """A collective has completed with wrong numbers."""


class Work:
    """The arrays of one load on one rank, and what the operations do with them.

    Args:
        operation: one of :data:`OPERATIONS`.
        shapes: of the arrays; one whose first dimension is the number of ranks for
            allgather, reduce_scatter and alltoall.
        dtype: of the arrays.
        rank, size: of the communicators.
        xp: NumPy or CuPy.
    """

    def __init__(
        self,
        operation: str,
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype[Any],
        rank: int,
        size: int,
        xp: ModuleType = np,
    ) -> None:
        self.operation = operation
        self.shapes = list(shapes)
        self.dtype = dtype
        self.rank = rank
        self.size = size
        self._xp = xp
        # Of allgather each rank has only its row of the whole.
        own = [s[1:] for s in shapes] if operation == "allgather" else shapes
        self.arrays: list[Any] = [xp.empty(shape, dtype) for shape in own]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole arrays."""
        n_elems = sum(math.prod(shape) for shape in self.shapes)
        return n_elems * self.dtype.itemsize

    def fill(self) -> None:
        """Give the arrays the values of this rank."""
        for k, array in enumerate(self.arrays):
            for part, pattern in _parts(array.reshape(-1), k):
                values = (pattern * _factor(self.rank)).astype(self.dtype)
                part[...] = self._xp.asarray(values)

    def run(self, comm: CommunicatorBase) -> Any:
        """Make one call; return its result. Collective."""
        if self.operation == "allreduce_arrays":
            return comm.allreduce_arrays(self.arrays)
        (array,) = self.arrays
        if self.operation == "bcast":
            return comm.bcast(array)
        call = getattr(comm, self.operation)
        return call(array)

    def check(self, result: Any, wire: np.dtype[Any] | None = None) -> None:
        """Compare a result of :meth:`run` after :meth:`fill`.

        Args:
            result: what :meth:`run` returned.
            wire: the dtype in which the arrays travelled, if not their own.

        Raises:
            WrongResultError: it is not what the operation gives.
        """
        factors = [_factor(r) for r in range(self.size)]
        name = self.operation
        if name == "allreduce_arrays":
            self._compare(result, sum(factors) / self.size, wire)
        elif name == "allreduce":
            self._compare([result], float(sum(factors)), wire)
        elif name == "bcast":
            self._compare([result], factors[0])
        elif name == "reduce_scatter":
            offset = self.rank * result.size
            self._compare([result], float(sum(factors)), wire, offset)
        else:
            # Of alltoall this rank gets row ``rank`` of everyone.
            offset = self.rank * result[0].size if name == "alltoall" else 0
            for row, factor in zip(result, factors, strict=True):
                self._compare([row], factor, None, offset)

    def _compare(
        self,
        results: Sequence[Any],
        factor: float,
        wire: np.dtype[Any] | None = None,
        offset: int = 0,
    ) -> None:
        eps = max(_EPSILON[dtype.name] for dtype in (self.dtype, wire or self.dtype))
        # Scaled, cast, and added up rank by rank; all terms are positive.
        tolerance = (self.size + 3) * eps
        for k, result in enumerate(results):
            for part, pattern in _parts(result.reshape(-1), k, offset):
                expected = pattern * factor
                got = _to_host(part).astype(expected.dtype)
                wrong = ~(abs(got - expected) <= tolerance * expected)
                if wrong.any():
                    i = wrong.argmax()
                    raise WrongResultError(
                        f"{self.operation}: {wrong.sum()} of {wrong.size} values are "
                        f"wrong, the first is {got[i]}; expected {expected[i]}"
                    )


def _factor(rank: int) -> int:
    return 1 + rank % _N_FACTORS


def _parts(flat: Any, k: int, offset: int = 0) -> Iterator[tuple[Any, Array]]:
    """Cut a flat array into parts; with each, the pattern of its elements on the host.

    On the host: filling and comparing is not timed, and asks little of CuPy.
    """
    first = offset + 7 * k
    pattern = 1.0 + np.arange(first, first + min(flat.size, _BLOCK)) % _PERIOD
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        yield part, pattern[: part.size]


def _to_host(array: Any) -> Array:
    host: Array = array if isinstance(array, np.ndarray) else array.get()
    return host


class BareMpi:
    """The same operation as a bare call of the MPI library on one flat host array.

    Args:
        work: whose operation and bytes; a reduction adds up in place. The arrays are
            not used.
        mpi_comm: mpi4py communicator.

    Raises:
        TypeError: MPI has no such dtype.
    """

    def __init__(self, work: Work, mpi_comm: Any) -> None:
        self._work = Work(
            "allreduce" if work.operation == "allreduce_arrays" else work.operation,
            [(work.nbytes // work.dtype.itemsize,)]
            if work.operation in ("allreduce_arrays", "allreduce", "bcast")
            else work.shapes,
            work.dtype,
            work.rank,
            work.size,
        )
        self._mpi = mpi_comm
        self._in_place = load("messages").IN_PLACE
        (shape,) = self._work.shapes
        self._sendbuf: Array = self._work.arrays[0]
        self._recvbuf = self._sendbuf
        if self._work.operation in ("allgather", "alltoall"):
            self._recvbuf = np.empty(shape, work.dtype)
        elif self._work.operation == "reduce_scatter":
            self._recvbuf = np.empty(shape[1:], work.dtype)

    def fill(self) -> None:
        """Give the array the values of this rank."""
        self._work.fill()

    def run(self) -> Any:
        """Make one call; return its result. Collective."""
        bare = self._work.operation
        if bare == "allreduce":
            self._mpi.Allreduce(self._in_place, self._recvbuf)
        elif bare == "bcast":
            self._mpi.Bcast(self._recvbuf)
        elif bare == "allgather":
            self._mpi.Allgather(self._sendbuf, self._recvbuf)
        elif bare == "reduce_scatter":
            self._mpi.Reduce_scatter_block(self._sendbuf, self._recvbuf)
        else:
            self._mpi.Alltoall(self._sendbuf, self._recvbuf)
        return self._recvbuf

    def check(self, result: Any) -> None:
        """Compare a result of :meth:`run` after :meth:`fill`.

        Raises:
            WrongResultError: it is not what the operation gives.
        """
        self._work.check(result)
        # Sums of sums would soon be infinite, those of zeros are zeros.
        self._sendbuf[...] = 0
