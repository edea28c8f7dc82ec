"""Kill writers of snapshots, and look each time what can be loaded.

    mpiexec -n 2 python kill_writers.py FOLDER save SEED
    mpiexec -n 2 python kill_writers.py FOLDER fork SEED N_KILLS LAST_SAVED

``save``: both ranks save set after set and print the number of each; after a random
time one of them kills itself with SIGKILL, which ends the job.

``fork``: N_KILLS times rank 0 forks two writers, which save set after set together as
ranks 0 and 1 do, and kills one or both of them with SIGKILL at a random moment. Then
both ranks load the newest set. Rank 0 prints what came of it.
"""

import collections
import gc
import json
import os
import pathlib
import random
import re
import select
import signal
import socket
import struct
import sys
import threading
import time

import numpy as np
from helpers.socket_engine import SocketEngine

import chainermn_ng
from chainermn_ng.communicators import ChainerCommunicator

_WAIT_S = 20.0


class Numbers:
    """Every number says which rank saved it, and when."""

    def __init__(self, rank, iteration=0):
        self.values = np.full(40_000, 1e6 * rank + iteration)

    def serialize(self, serializer):
        serializer("values", self.values)


def save_for_ever(comm, folder, iteration, report):
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, cp_interval=1, gc_interval=1, path=str(folder)
    )
    while True:
        checkpointer.save(Numbers(comm.rank, iteration), iteration)
        report(iteration)
        iteration += 1


def save_and_die(comm, folder, seed):
    generator = random.Random(seed)
    victim, delay_s = generator.randrange(2), generator.uniform(0.2, 0.6)
    if comm.rank == victim:
        kill = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        kill.start()
    save_for_ever(comm, folder, 1, lambda i: print(f"saved {i}", flush=True))


def fork_writers(folder, iteration):
    """Start two writers; return their ids and the pipe with what they have saved."""
    connections = socket.socketpair()
    read_end, write_end = os.pipe()
    pids = []
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            # Nothing of MPI's may be touched, nor be cleaned up.
            gc.disable()
            connections[1 - rank].close()
            os.close(read_end)
            try:
                comm = ChainerCommunicator(SocketEngine(rank, connections[rank]))
                save_for_ever(
                    comm, folder, iteration, lambda i: os.write(write_end, _packed(i))
                )
            finally:
                os._exit(1)
        pids.append(pid)
    for connection in connections:
        connection.close()
    os.close(write_end)
    return pids, read_end


def _packed(iteration):
    return struct.pack("<q", iteration)


def kill_at_random(generator, pids, read_end):
    """Kill one writer or both in the middle; return the newest set that they saved."""
    # They are saving for sure when the first set is there.
    began = time.monotonic()
    assert select.select([read_end], [], [], _WAIT_S)[0], "the writers do not write"
    took_s = time.monotonic() - began
    time.sleep(generator.uniform(0, min(2.5 * took_s, 0.3)))
    for pid in generator.choice([pids[:1], pids[1:], pids]):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _WAIT_S
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline, "a writer outlives the other"
            time.sleep(0.002)
    content = b""
    while part := os.read(read_end, 4096):
        content += part
    os.close(read_end)
    return max(i for (i,) in struct.iter_unpack("<q", content))


def look(folder):
    """Return the newest set with both files, and what unfinished there is, by kind."""
    ranks = collections.defaultdict(set)
    kinds = set()
    for name in os.listdir(folder):
        match = re.fullmatch(r"run\.(\d)\.(\d+)(?:-(\d+))?", name)
        if match:
            key = int(match[2]), int(match[3] or 0)
            ranks[key].add(int(match[1]))
        elif name.startswith("tmp-"):
            kinds.add("temporary")
        else:
            kinds.add(name)
    newest = max(key for key, found in ranks.items() if len(found) == 2)
    if max(ranks) > newest:
        kinds.add("half a set")
    return newest[0], sorted(kinds)


def load(comm, folder, last_saved):
    """Load on both ranks; return the iteration, or raise on both."""
    numbers = Numbers(-1)
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, path=str(folder)
    )
    newest, _ = look(folder)
    iteration = checkpointer.maybe_load(numbers)
    expected = Numbers(comm.rank, iteration).values
    seen = (iteration, newest, last_saved, bool((numbers.values == expected).all()))
    told = comm.allgather_obj(seen)
    assert all(i == n >= last and right for i, n, last, right in told), f"{told}"
    assert told[0][0] == told[1][0], f"{told}"
    return iteration


def kill_many(comm, folder, seed, n_kills, last_saved):
    generator = random.Random(seed)
    iteration = load(comm, folder, last_saved)
    left = collections.Counter()
    n_saved = 0
    for _ in range(n_kills):
        if comm.rank == 0:
            pids, read_end = fork_writers(folder, iteration + 1)
            last_saved = kill_at_random(generator, pids, read_end)
            n_saved += last_saved - iteration
            left.update(look(folder)[1])
        last_saved = comm.bcast_obj(last_saved)
        iteration = load(comm, folder, last_saved)
    checkpointer = chainermn_ng.create_multi_node_checkpointer(
        "run", comm, path=str(folder)
    )
    checkpointer.save(Numbers(comm.rank, iteration + 1), iteration + 1)
    comm.barrier()
    report = {"saved": n_saved, "left": left, "at last": look(folder)[1]}
    return [report, {}] if comm.rank == 0 else None


def main():
    folder, mode, seed, *rest = sys.argv[1:]
    folder = pathlib.Path(folder)
    with chainermn_ng.create_communicator("naive", timeout_s=30) as comm:
        if mode == "save":
            save_and_die(comm, folder, int(seed))
        reports = kill_many(comm, folder, int(seed), *map(int, rest))
        if comm.rank == 0:
            print("REPORT " + json.dumps(reports), flush=True)


if __name__ == "__main__":
    main()
