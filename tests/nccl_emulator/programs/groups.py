"""Ranks that group calls, split communicators and send to each other."""

from __future__ import annotations

import os
import pathlib

import numpy as np

from nccl_emulator.library import NO_COLOR, NcclFailure
from nccl_emulator.programs.failures import caught, sum_ones
from nccl_emulator.ranks import Ranks


def all_to_all(ranks: Ranks, count: int) -> None:
    """Each rank sends to all, itself included, in another order than it receives."""
    comm = ranks.join()
    size, rank = comm.size, comm.rank
    send = np.arange(size * count, dtype=np.int64).reshape(size, count) + 1000 * rank
    recv = np.full((size, count), -1)
    with ranks.library.group():
        for step in range(size):
            comm.recv(recv[(rank - step) % size], (rank - step) % size)
        for step in range(size):
            comm.send(send[(rank + step) % size], (rank + step) % size)
    own = np.arange(count) + rank * count
    for source in range(size):
        assert (recv[source] == own + 1000 * source).all(), source
    comm.destroy()


def several_messages_of_a_pair(ranks: Ranks) -> None:
    """Messages from one rank to one other arrive in the order of their sends."""
    comm = ranks.join()
    arrays = [np.full(n, n, np.float32) for n in (3, 0, 70_000, 1)]
    found = [np.zeros_like(array) for array in arrays]
    with ranks.library.group():
        for array, place in zip(arrays, found, strict=True):
            if comm.rank == 0:
                comm.send(array, 1)
            else:
                comm.recv(place, 0)
    if comm.rank == 1:
        for array, place in zip(arrays, found, strict=True):
            assert (array == place).all()
    comm.destroy()


def lone_messages(ranks: Ranks) -> None:
    """Outside of a group a send meets its receive, one after the other."""
    comm = ranks.join()
    array = np.arange(100_000.0)
    for _ in range(3):
        if comm.rank == 0:
            comm.send(array, 1)
            comm.recv(array, 1)
        else:
            recv = np.zeros_like(array)
            comm.recv(recv, 0)
            comm.send(recv + 1, 0)
    assert comm.rank == 1 or (array == np.arange(100_000.0) + 3).all()
    comm.destroy()


def mixed_group(ranks: Ranks) -> None:
    """Collectives and messages of two communicators in nested groups."""
    first, second = ranks.join(), ranks.join()
    library, rank, other = ranks.library, ranks.rank, 1 - ranks.rank
    sums = [np.full(5, rank + 1.0), np.full(50_000, rank + 1.0)]
    send, recv = np.full(3, rank, np.int32), np.full(3, -1, np.int32)
    # Its own array: what the other message sends may still be on its way.
    recv_first = np.full(3, -1, np.int32)
    with library.group():
        if rank == 0:
            first.all_reduce(sums[0], sums[0])
            with library.group():
                first.send(send, other)
        second.recv(recv, other)
        second.all_reduce(sums[1], sums[1])
        with library.group():
            second.send(send, other)
        # Nothing has started: the group goes on.
        assert (sums[1] == rank + 1).all()
        assert (recv == -1).all()
        if rank == 1:
            first.recv(recv_first, other)
            first.all_reduce(sums[0], sums[0])
    assert (sums[0] == 3).all()
    assert (sums[1] == 3).all()
    assert (recv == other).all()
    assert rank == 0 or (recv_first == 0).all()
    assert (send == rank).all()


def collectives_of_one_communicator(ranks: Ranks) -> None:
    """Collectives of a group run in the order of their calls."""
    comm = ranks.join()
    array = np.ones(4)
    with ranks.library.group():
        comm.all_reduce(array, array)
        comm.all_reduce(array, array)
        comm.broadcast(array, array)
    assert (array == comm.size**2).all()


def error_in_group(ranks: Ranks) -> list[int]:
    """A call that is refused inside a group ends the whole group."""
    comm = ranks.join()
    array = np.ones(4)
    codes = []
    ranks.library.call("GroupStart")
    comm.all_reduce(array, array)
    codes.append(caught(comm.broadcast, array, array, comm.size)[0])
    codes.append(caught(ranks.library.call, "GroupEnd")[0])
    assert (array == 1).all()
    sum_ones(comm)
    with ranks.library.group():
        pass
    return codes


def half_of_an_own_message(ranks: Ranks) -> int:
    """A send to oneself without its receive."""
    comm = ranks.join()
    try:
        with ranks.library.group():
            comm.send(np.ones(2), comm.rank)
    except NcclFailure as failure:
        return failure.code
    return 0


def destroyed_in_group(ranks: Ranks) -> int:
    """A communicator that is destroyed before the group ends."""
    comm = ranks.join()
    array = np.ones(2)
    ranks.library.call("GroupStart")
    comm.all_reduce(array, array)
    comm.destroy()
    return caught(ranks.library.call, "GroupEnd")[0]


def inits_in_group(ranks: Ranks) -> None:
    """Communicators are made at the end of a group."""
    import ctypes

    from nccl_emulator.library import Communicator, UniqueId

    members = list(range(ranks.size))
    handles = [ctypes.c_void_p(), ctypes.c_void_p()]
    ids = [ranks.unique_id(members) for _ in handles]
    order = [0, 1] if ranks.rank == 0 else [1, 0]
    with ranks.library.group():
        for i in order:
            unique_id = UniqueId.from_buffer_copy(ids[i])
            args = ctypes.byref(handles[i]), ranks.size, unique_id, ranks.rank
            ranks.library.call("CommInitRank", *args)
            assert handles[i].value is None
    for handle in handles:
        sum_ones(Communicator(ranks.library, handle))


def splits(ranks: Ranks) -> dict[str, object]:
    """Split by color and key, in several ways; return what the ranks became."""
    world = ranks.join()
    size, rank = world.size, world.rank
    found: dict[str, object] = {}
    parts = {
        "all": world.split(5, 0),
        "reversed": world.split(0, -rank),
        "parity": world.split(rank % 2, 0),
        "alone": world.split(rank, 0),
        "one left out": world.split(NO_COLOR if rank == 0 else 1, 0),
    }
    for name, part in parts.items():
        found[name] = None if part is None else (part.rank, part.size)
    nested = parts["reversed"].split(rank // 2, 0)
    found["nested"] = (nested.rank, nested.size)
    # The children do not need their parent.
    world.destroy()
    parts["reversed"].destroy()
    for part in [nested, *parts.values()]:
        if part is None or part is parts["reversed"]:
            continue
        sum_ones(part)
        gathered = np.full(part.size, -1, np.int32)
        part.all_gather(np.full(1, part.rank, np.int32), gathered)
        assert (gathered == np.arange(part.size)).all()
    assert size == ranks.size
    return found


def splits_in_group(ranks: Ranks) -> None:
    """Two splits of one communicator, and of two in crossed order, in a group."""
    import ctypes

    from nccl_emulator.library import Communicator

    comms = [ranks.join(), ranks.join()]
    places = [ctypes.c_void_p() for _ in range(4)]
    order = [0, 1, 2, 3] if ranks.rank == 0 else [2, 0, 3, 1]
    with ranks.library.group():
        for i in order:
            handle = comms[i // 2].handle
            place = ctypes.byref(places[i])
            ranks.library.call("CommSplit", handle, 0, i * ranks.rank, place, None)
    for place in places:
        sum_ones(Communicator(ranks.library, place))


def properties(ranks: Ranks) -> list[tuple[int, int, int]]:
    """Return rank, size and device of a communicator, by NCCL's functions."""
    comm = ranks.join()
    sizes = "CommUserRank", "CommCount", "CommCuDevice"
    return tuple(comm.value(name) for name in sizes)


def single_init_all(ranks: Ranks) -> tuple[int, int]:
    """ncclCommInitAll for one device works, for two it is refused."""
    import ctypes

    from nccl_emulator.library import Communicator

    handles = (ctypes.c_void_p * 2)()
    place = ctypes.cast(handles, ctypes.POINTER(ctypes.c_void_p))
    ranks.library.call("CommInitAll", place, 1, None)
    comm = Communicator(ranks.library, ctypes.c_void_p(handles[0]))
    sum_ones(comm)
    return comm.size, caught(ranks.library.call, "CommInitAll", place, 2, None)[0]


def _mappings() -> list[str]:
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "nccl_emulator" in line and "memfd" in line]


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def many_lives(ranks: Ranks) -> tuple[int, int, int]:
    """Make and destroy communicators; return mappings, files and named files left."""
    sum_ones(ranks.join())
    before = len(_mappings()), _files()
    for i in range(10):
        comm = ranks.join()
        part = comm.split(0, 0)
        sum_ones(part)
        if i % 2:
            part.abort()
            comm.abort()
        else:
            part.destroy()
            comm.destroy()
        ranks.barrier()
    named = [name for name in os.listdir("/dev/shm") if "nccl" in name]
    # The memory that is mapped has no name either.
    assert all("(deleted)" in line for line in _mappings())
    after = len(_mappings()), _files()
    return after[0] - before[0], after[1] - before[1], len(named)


def child_of_fork(ranks: Ranks) -> int:
    """A forked process has none of its parent's communicators, nor harms them."""
    comm = ranks.join()
    sum_ones(comm)
    if (child := os.fork()) == 0:
        code = caught(sum_ones, comm)[0]
        single = ranks.library.init(1, ranks.library.unique_id(), 0)
        sum_ones(single)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    sum_ones(comm)
    return os.waitstatus_to_exitcode(status)
