"""Ranks whose environment orders faults, delays and logs."""

from __future__ import annotations

import threading
import time

import numpy as np

from nccl_emulator.programs.failures import caught, sum_ones
from nccl_emulator.ranks import Ranks


def three_calls(ranks: Ranks) -> list[int]:
    """Make three all-reduces on a communicator of one's own; return their codes."""
    unique_id = ranks.library.unique_id()
    world = ranks.join()
    comm = ranks.library.init(1, unique_id, 0)
    codes = [caught(sum_ones, comm)[0] for _ in range(3)]
    world.destroy()
    return codes


def each_call(ranks: Ranks) -> dict[str, int]:
    """Make one call of each kind, alone; return the codes."""
    library = ranks.library
    codes = {"GetUniqueId": caught(library.unique_id)[0]}
    unique_id = library.unique_id()
    codes["Init"] = caught(library.init, 1, unique_id, 0)[0]
    comm = library.init(1, library.unique_id(), 0)
    array = np.zeros(3)
    codes |= {"Send": 0, "Recv": 0}

    def message() -> None:
        with library.group():
            codes["Send"] |= caught(comm.send, array, 0)[0]
            codes["Recv"] |= caught(comm.recv, array, 0)[0]

    caught(message)
    codes["GroupEnd"] = caught(message)[0]
    for name, function in {
        "AllReduce": lambda: comm.all_reduce(array, array),
        "Reduce": lambda: comm.reduce(array, array),
        "Broadcast": lambda: comm.broadcast(array, array),
        "ReduceScatter": lambda: comm.reduce_scatter(array, array),
        "AllGather": lambda: comm.all_gather(array, array),
        "Split": lambda: comm.split(0, 0),
    }.items():
        codes[name] = caught(function)[0]
    return codes


def failing_group(ranks: Ranks) -> tuple[int, int, bool]:
    """The second call of a group fails by order: nothing of the group happens."""
    comm = ranks.join()
    arrays = [np.ones(3), np.ones(3)]
    ranks.library.call("GroupStart")
    comm.all_reduce(arrays[0], arrays[0])
    inside = caught(comm.all_reduce, arrays[1], arrays[1])[0]
    end = caught(ranks.library.call, "GroupEnd")[0]
    untouched = all((array == 1).all() for array in arrays)
    sum_ones(comm)
    return inside, end, untouched


def asynchronous(ranks: Ranks):
    """The second all-reduce of rank 1 fails without saying so."""
    comm = ranks.join()
    sum_ones(comm)
    array = np.ones(3)
    if ranks.rank == 1:
        comm.all_reduce(array, array)
        found = bool((array == 1).all()), comm.async_error()
        later = caught(sum_ones, comm)[0]
        ranks.barrier()
        return found, later
    # This rank waits for the other, until it gives up.
    timer = threading.Timer(0.3, comm.abort)
    timer.start()
    result = caught(comm.all_reduce, array, array)
    timer.join()
    ranks.barrier()
    return result


def hanging(ranks: Ranks):
    """The second all-reduce of rank 1 never ends, until both give up."""
    comm = ranks.join()
    sum_ones(comm)
    array = np.ones(3)
    timer = threading.Timer(0.8, comm.abort)
    timer.start()
    result = caught(comm.all_reduce, array, array)
    timer.join()
    return result


def slow_calls(ranks: Ranks) -> tuple[float, float]:
    """Return the seconds before and in two all-reduces on communicators of one rank."""
    library = ranks.library
    ranks.join().destroy()
    comm = library.init(1, library.unique_id(), 0)
    start = time.monotonic()
    sum_ones(comm)
    sum_ones(comm)
    alone_s = time.monotonic() - start
    # A long delay ends when the communicator is aborted.
    timer = threading.Timer(0.05, comm.abort)
    timer.start()
    start = time.monotonic()
    caught(sum_ones, comm)
    timer.join()
    return alone_s, time.monotonic() - start


def logged(ranks: Ranks) -> None:
    """Make some calls of which the log is known."""
    comm = ranks.join()
    part = comm.split(0, -ranks.rank)
    send, recv = np.zeros(6, np.float32), np.zeros(6, np.float32)
    comm.all_reduce(send, recv, "max", stream=0xABC)
    comm.all_reduce(send, send)
    part.broadcast(send, send, 1)
    shared = send[3 * comm.rank :][:3]
    comm.reduce_scatter(send, shared, "avg")
    comm.all_gather(shared, send)
    with ranks.library.group():
        comm.send(send, 1 - comm.rank)
        comm.recv(recv, 1 - comm.rank)
    part.destroy()
    comm.destroy()


def version(ranks: Ranks) -> tuple[int, str]:
    """Return the version and the kind of memory that the library tells."""
    import ctypes

    number = ctypes.c_int()
    ranks.library.call("GetVersion", ctypes.byref(number))
    return number.value, ranks.library.functions.ncclEmulatorMemory().decode()
