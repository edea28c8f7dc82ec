"""Drive the emulator through a real Python binding, on NumPy memory.

``python -m nccl_emulator.programs.bindings cupy|pynccl N_RANKS`` starts the ranks, each
a process of its own with this environment; the emulator is found as NVIDIA's library
would be.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

FLOAT32, FLOAT64, SUM, AVG, MAX = 7, 8, 0, 4, 2


def _error_of(kind: type[Exception], function: Callable, *args: object) -> Exception:
    """Call a function that has to fail, and return its error."""
    try:
        function(*args)
    except kind as error:
        return error
    raise AssertionError(f"{function} did not fail")


class CuPyBinding:
    """cupy.cuda.nccl."""

    def __init__(self) -> None:
        from cupy.cuda import nccl

        self.nccl = nccl
        assert nccl.get_version() == 22707

    def unique_id(self):
        return self.nccl.get_unique_id()

    def join(self, size: int, unique_id, rank: int) -> None:
        self.comm = self.nccl.NcclCommunicator(size, unique_id, rank)
        assert (self.comm.size(), self.comm.rank_id()) == (size, rank)

    def run(self, size: int, rank: int) -> None:
        """Call everything that the binding has."""
        comm, nccl = self.comm, self.nccl
        own = np.arange(5, dtype=np.float32) + rank
        recv = np.empty_like(own)
        send_pointer, recv_pointer = own.ctypes.data, recv.ctypes.data
        comm.allReduce(send_pointer, recv_pointer, 5, FLOAT32, SUM, 0)
        assert (recv == sum(np.arange(5) + r for r in range(size))).all()
        comm.reduce(send_pointer, recv_pointer, 5, FLOAT32, MAX, 1, 0)
        assert rank != 1 or (recv == np.arange(5) + size - 1).all()
        recv[:] = own
        comm.broadcast(send_pointer, recv_pointer, 5, FLOAT32, 1, 0)
        assert (recv == np.arange(5) + 1).all()
        recv[:] = own
        comm.bcast(recv_pointer, 5, FLOAT32, 0, 0)
        assert (recv == np.arange(5)).all()
        gathered = np.empty((size, 5), np.float32)
        comm.allGather(send_pointer, gathered.ctypes.data, 5, FLOAT32, 0)
        assert (gathered == np.arange(5) + np.arange(size)[:, None]).all()
        comm.reduceScatter(gathered.ctypes.data, recv_pointer, 5, FLOAT32, AVG, 0)
        assert (recv == np.arange(5) + rank).all()
        nccl.groupStart()
        comm.send(send_pointer, 5, FLOAT32, (rank + 1) % size, 0)
        comm.recv(recv_pointer, 5, FLOAT32, (rank - 1) % size, 0)
        nccl.groupEnd()
        assert (recv == np.arange(5) + (rank - 1) % size).all()
        part = comm.commSplit(rank % 2, -rank)
        assert part.size() == len(range(rank % 2, size, 2))
        part.allReduce(send_pointer, send_pointer, 5, FLOAT32, SUM, 0)
        part.destroy()
        comm.check_async_error()
        comm.destroy()
        assert _error_of(nccl.NcclError, nccl.groupEnd).status == 5


class PyncclBinding:
    """pynccl.binding, whose unique id is four times as long as NCCL's."""

    def __init__(self) -> None:
        from pynccl import binding

        self.binding = binding
        self.api = binding.cuNccl()._api
        version = ctypes.c_int()
        self.api.ncclGetVersion(ctypes.byref(version))
        assert version.value == 22707

    def unique_id(self) -> bytes:
        unique_id = self.binding.ncclUniqueId()
        self.api.ncclGetUniqueId(ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, size: int, unique_id: bytes, rank: int) -> None:
        argument = self.binding.ncclUniqueId.from_buffer_copy(unique_id)
        self.comm = ctypes.c_void_p()
        self.api.ncclCommInitRank(ctypes.byref(self.comm), size, argument, rank)

    def run(self, size: int, rank: int) -> None:
        """Call a few functions of each kind."""
        api, comm = self.api, self.comm
        stream = self.binding.cu_stream(0)
        own, recv = np.arange(4.0) + rank, np.empty(4)
        send_pointer, recv_pointer = own.ctypes.data, recv.ctypes.data
        api.ncclAllReduce(send_pointer, recv_pointer, 4, FLOAT64, SUM, comm, stream)
        assert (recv == sum(np.arange(4) + r for r in range(size))).all()
        api.ncclGroupStart()
        api.ncclSend(send_pointer, 4, FLOAT64, (rank + 1) % size, comm, stream)
        api.ncclRecv(recv_pointer, 4, FLOAT64, (rank - 1) % size, comm, stream)
        api.ncclGroupEnd()
        assert (recv == np.arange(4) + (rank - 1) % size).all()
        error = ctypes.c_int(-1)
        api.ncclCommGetAsyncError(comm, ctypes.byref(error))
        assert error.value == 0
        api.ncclCommDestroy(comm)
        error = _error_of(self.binding.NcclV2Error, api.ncclCommDestroy, comm)
        assert "ncclInvalidArgument" in str(error)


BINDINGS = {"cupy": CuPyBinding, "pynccl": PyncclBinding}


def _rank(name: str, size: int, rank: int, connection: Connection) -> None:
    binding = BINDINGS[name]()
    if rank == 0:
        connection.send(binding.unique_id())
    binding.join(size, connection.recv(), rank)
    binding.run(size, rank)


def main() -> int:
    """Start the ranks, pass the unique id on, and return the worst exit status."""
    name, size = sys.argv[1], int(sys.argv[2])
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(name, size, rank, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    unique_id = pipes[0][0].recv()
    for pipe in pipes:
        pipe[0].send(unique_id)
    for process in processes:
        process.join(40)
        process.kill()
        process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
