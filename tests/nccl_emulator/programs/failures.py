"""Ranks that make mistakes, wait for each other, leave or die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

from nccl_emulator.library import Communicator, NcclFailure
from nccl_emulator.ranks import Ranks

SLOW_S = 0.6


def caught(function: Callable[..., object], *args: object) -> tuple[int, str, float]:
    """Call a function; return NCCL's code and text, and the seconds it took."""
    start = time.monotonic()
    try:
        function(*args)
    except NcclFailure as failure:
        return failure.code, failure.text, time.monotonic() - start
    return 0, "", time.monotonic() - start


def sum_ones(comm: Communicator, n_elems: int = 4) -> None:
    """Reduce an array of ones and check the sum."""
    array = np.ones(n_elems, np.float32)
    comm.all_reduce(array, array)
    assert (array == comm.size).all()


def circle(ranks: Ranks):
    """Each rank shares a communicator with the next, and calls on the two in turn."""
    size, rank = ranks.size, ranks.rank
    pairs = [sorted([i, (i + 1) % size]) for i in range(size)]
    comms = {}
    for i, pair in enumerate(pairs if size > 2 else [[0, 1], [0, 1]]):
        if rank in pair:
            comms[i] = ranks.join(pair)
    # All would be well in the order of the pairs; this rank takes its own one first.
    first, second = comms[rank], comms[(rank - 1) % size]
    result = caught(sum_ones, first)
    after = caught(sum_ones, first)[0], first.async_error()
    ranks.barrier()
    for comm in (first, second):
        comm.abort()
    return result, after


def circle_in_group(ranks: Ranks) -> None:
    """The same calls as in :func:`circle`, in a group: no error."""
    size, rank = ranks.size, ranks.rank
    comms = [ranks.join() for _ in range(size)]
    arrays = [np.full(5, float(i)) for i in range(size)]
    with ranks.library.group():
        for i in range(size):
            index = (rank + i) % size
            comms[index].all_reduce(arrays[index], arrays[index])
    for i, array in enumerate(arrays):
        assert (array == size * i).all()
    for comm in comms:
        comm.destroy()


def two_sends(ranks: Ranks):
    """Both ranks send first, outside of a group."""
    comm = ranks.join()
    buffer = np.zeros(3)
    result = caught(comm.send, buffer, 1 - ranks.rank)
    ranks.barrier()
    comm.abort()
    return result


def send_against_collective(ranks: Ranks):
    """One rank sends while the other is in a collective."""
    comm = ranks.join()
    buffer = np.zeros(3)
    if ranks.rank == 0:
        result = caught(comm.send, buffer, 1)
    else:
        result = caught(comm.all_reduce, buffer, buffer)
    ranks.barrier()
    comm.abort()
    return result


def slow_rank(ranks: Ranks) -> None:
    """The last rank comes late, to calls on two communicators: no error."""
    first, second = ranks.join(), ranks.join()
    for comm in (first, second, first):
        if ranks.rank == ranks.size - 1:
            time.sleep(SLOW_S)
        sum_ones(comm)


def crossed_threads(ranks: Ranks) -> None:
    """Two threads a rank, a communicator each, each late on another rank: no error."""
    comms = [ranks.join(), ranks.join()]
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            sum_ones(comms[index])
            if index == ranks.rank:
                time.sleep(SLOW_S)
            sum_ones(comms[index])
        except NcclFailure as failure:
            errors.append(failure)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def stopped_rank(ranks: Ranks) -> None:
    """Rank 1 is stopped while it waits for rank 0, which comes and goes on: no error.

    Rank 0 then waits for rank 1 on another communicator, and sees it waiting for a call
    that it has made long ago.
    """
    first, second = ranks.join(), ranks.join()
    array = np.full(4, ranks.rank, np.float32)
    helper = None
    if ranks.rank == 1:
        pid = os.getpid()
        if (helper := os.fork()) == 0:
            time.sleep(SLOW_S)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2 * SLOW_S)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
    else:
        time.sleep(1.5 * SLOW_S)
    first.broadcast(array, array)
    sum_ones(second)
    assert (array == 0).all()
    if helper is not None:
        os.waitpid(helper, 0)


MISMATCHES = {
    "operation": ("all_reduce", "reduce"),
    "count": ("all_reduce", "all_reduce_longer"),
    "type": ("all_reduce", "all_reduce_float64"),
    "operator": ("all_reduce", "all_reduce_max"),
    "root": ("broadcast", "broadcast_from_1"),
    "split": ("all_reduce", "split"),
}


def _calls(comm: Communicator) -> dict[str, Callable[[], object]]:
    short, longer = np.zeros(4, np.float32), np.zeros(5, np.float32)
    double = np.zeros(4)
    return {
        "all_reduce": lambda: comm.all_reduce(short, short),
        "all_reduce_longer": lambda: comm.all_reduce(longer, longer),
        "all_reduce_float64": lambda: comm.all_reduce(double, double),
        "all_reduce_max": lambda: comm.all_reduce(short, short, "max"),
        "reduce": lambda: comm.reduce(short, short),
        "broadcast": lambda: comm.broadcast(short, short, 0),
        "broadcast_from_1": lambda: comm.broadcast(short, short, 1),
        "split": lambda: comm.split(0, 0),
    }


def mismatch(ranks: Ranks, names: tuple[str, str]):
    """The last rank makes another call than the others, after one that is right."""
    comm = ranks.join()
    sum_ones(comm)
    result = caught(_calls(comm)[names[ranks.rank == ranks.size - 1]])
    later = caught(sum_ones, comm)[0], comm.async_error()
    ranks.barrier()
    comm.abort()
    return result, later


def message_mismatch(ranks: Ranks, what: str):
    """A receive of another length or type than the send."""
    comm = ranks.join()
    if ranks.rank == 0:
        result = caught(comm.send, np.zeros(4), 1)
    else:
        buffer = np.zeros(5) if what == "count" else np.zeros(4, np.float32)
        result = caught(comm.recv, buffer, 0)
    ranks.barrier()
    comm.abort()
    return result


def die_and_wait(ranks: Ranks, how: str, splits: bool = False):
    """The last rank ends while the others wait for it."""
    comm = ranks.join()
    sum_ones(comm)
    if ranks.rank == ranks.size - 1:
        time.sleep(0.3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "destroyed":
            comm.destroy()
            return None
        elif how == "aborted":
            comm.abort()
            return None
        os._exit(0)
    result = caught(comm.split, 0, 0) if splits else caught(sum_ones, comm)
    later = caught(sum_ones, comm)[0], comm.async_error()
    comm.abort()
    return result, later


def die_before_init(ranks: Ranks):
    """The last rank ends before it joins; or the maker of the id does."""
    unique_id = ranks.unique_id(list(range(ranks.size)))
    if ranks.rank == ranks.size - 1:
        os._exit(0)
    return caught(ranks.library.init, ranks.size, unique_id, ranks.rank)


def die_during_init(ranks: Ranks):
    """A rank that has joined is killed before the last one comes."""
    unique_id = ranks.unique_id(list(range(ranks.size)))
    if ranks.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if ranks.rank == 2:
        time.sleep(1.5)
    return caught(ranks.library.init, ranks.size, unique_id, ranks.rank)


def id_of_dead_process(ranks: Ranks):
    """The process that made the unique id is no more."""
    unique_id = ranks.unique_id([0, 1])
    if ranks.rank == 0:
        os._exit(0)
    time.sleep(0.3)
    return caught(ranks.library.init, ranks.size, unique_id, ranks.rank)


def leave_early(ranks: Ranks) -> bool:
    """Ranks that have done their part destroy and end: the others are not disturbed."""
    comm = ranks.join()
    array = np.full(300_000, ranks.rank, np.float32)
    if ranks.rank == 0:
        comm.broadcast(array, array)
        comm.destroy()
        return True
    time.sleep(0.3)
    comm.broadcast(array, array)
    return bool((array == 0).all())


def abort_while_waiting(ranks: Ranks, call: str):
    """Another thread aborts while this one waits in a call that never ends."""
    comm, other = ranks.join(), ranks.join()
    if ranks.rank == 1:
        ranks.hear(0)
        return None
    buffer = np.zeros(100_000)
    timer = threading.Timer(0.3, comm.abort)

    def wait() -> None:
        if call == "group":
            with ranks.library.group():
                other.all_reduce(buffer, buffer)
                comm.all_reduce(buffer, buffer)
        elif call == "split":
            comm.split(0, 0)
        elif call == "send":
            comm.send(buffer, 1)
        else:
            comm.all_reduce(buffer, buffer)

    timer.start()
    result = caught(wait)
    timer.join()
    after = caught(sum_ones, comm)[0], caught(comm.abort)[0]
    ranks.tell(1, "done")
    return result, after


def wrong_inits(ranks: Ranks, what: str):
    """Ranks that do not agree on who they are and how many."""
    unique_id = ranks.unique_id(list(range(ranks.size)))
    size, rank = ranks.size, ranks.rank
    if rank == ranks.size - 1:
        if what == "size":
            size += 1
        else:
            rank = 0
    return caught(ranks.library.init, size, unique_id, rank)


def used_id(ranks: Ranks):
    """A unique id makes one communicator."""
    unique_id = ranks.unique_id([0, 1])
    comm = ranks.library.init(2, unique_id, ranks.rank)
    ranks.barrier()
    result = caught(ranks.library.init, 2, unique_id, ranks.rank)
    comm.destroy()
    return result


def wrong_arguments(ranks: Ranks) -> dict[str, int]:
    """Calls that are refused on the spot; the communicator stays as it was."""
    comm, library = ranks.join(), ranks.library
    buffer = np.zeros(8, np.float32)
    half, pointer = buffer[:4], buffer.ctypes.data
    handle = comm.handle
    reduce_args = pointer, pointer, 8
    codes = {
        "type": ("AllReduce", *reduce_args, 10, 0, handle, None),
        "negative type": ("AllReduce", *reduce_args, -1, 0, handle, None),
        "operator": ("AllReduce", *reduce_args, 7, 5, handle, None),
        "no buffer": ("AllReduce", None, pointer, 8, 7, 0, handle, None),
        "no result": ("AllReduce", pointer, None, 8, 7, 0, handle, None),
        "count": ("AllReduce", pointer, pointer, 2**63, 7, 0, handle, None),
        "root": ("Broadcast", *reduce_args, 7, comm.size, handle, None),
        "negative root": ("Reduce", *reduce_args, 7, 0, -1, handle, None),
        "peer": ("Send", pointer, 8, 7, comm.size, handle, None),
        "NULL": ("AllReduce", *reduce_args, 7, 0, None, None),
        "not a handle": ("AllReduce", *reduce_args, 7, 0, 12345, None),
        "color": ("CommSplit", handle, -2, 0, library_place(), None),
        "no place": ("CommSplit", handle, 0, 0, None, None),
        "overlap": ("AllReduce", pointer, half.ctypes.data + 8, 4, 7, 0, handle, None),
        "to oneself": ("Send", pointer, 8, 7, comm.rank, handle, None),
        "group end": ("GroupEnd",),
    }
    found = {name: caught(library.call, *call)[0] for name, call in codes.items()}
    sum_ones(comm)
    comm.destroy()
    found["destroyed"] = caught(sum_ones, comm)[0]
    found["destroyed twice"] = caught(comm.destroy)[0]
    found["aborted after"] = caught(comm.abort)[0]
    return found


def library_place():
    """Return a place for a handle."""
    import ctypes

    return ctypes.byref(ctypes.c_void_p())


def finalized(ranks: Ranks):
    """After ncclCommFinalize only ncclCommDestroy is left."""
    comm = ranks.join()
    sum_ones(comm)
    comm.call("CommFinalize", comm.handle)
    code = caught(sum_ones, comm)[0]
    comm.destroy()
    return code
