"""What each group sends is what the algorithm promises, for every grid."""

from __future__ import annotations

import json

import pytest
from helpers.jobs import run_job

from communicators import available_communicators
from communicators.devices.host import nccl_takes_host_memory

COUNT = """
import json, sys
import numpy as np
from communicators import create_communicator

def factorisations(n):
    if n == 1:
        yield ()
    for p in range(2, n + 1):
        if n % p == 0:
            for rest in factorisations(n // p):
                yield (p, *rest)

from mpi4py import MPI
size = MPI.COMM_WORLD.size
n_elems = 12 * size * size         # parts of all factors are whole 16 bytes
rows = []
for dims in factorisations(size):
    # 64 chunks of it would be uneven: one chunk.
    with create_communicator("multi_ring", dims=dims, n_chunks=1) as comm:
        data = np.full(n_elems, comm.rank + 1.0, "f4")
        got = comm.allreduce(data)
        assert (got == size * (size + 1) / 2).all()
        sent = comm.allgather_obj(comm.sent_bytes)
        rows.append([dims, data.nbytes, sent])
if comm.rank == 0:
    print(json.dumps(rows))
"""


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_every_factorisation_sends_what_the_formula_says(size):
    job = run_job(size, ["-c", COUNT], timeout_s=100)
    assert job.returncode == 0, job.output
    rows = json.loads(job.stdout)
    assert len(rows) == {4: 2, 6: 3, 8: 4, 12: 8}[size]
    for dims, nbytes, sent_by_rank in rows:
        for sent in sent_by_rank:
            part = nbytes
            for i, p in enumerate(dims):
                # 2 (1 - 1/p_i) M_i, M_i = M / (p_0 ... p_{i-1})
                assert sent[f"dim{i}"] == 2 * (p - 1) * part // p, (dims, sent)
                part //= p
            # The inter-node dimensions together do not depend on the factors.
            rest = sum(sent[f"dim{i}"] for i in range(1, len(dims)))
            outer = size // dims[0]
            assert rest == 2 * (outer - 1) * nbytes // dims[0] // outer


NAMED = """
import json
import numpy as np
from communicators import create_communicator

rows = {}
for name in ("flat", "naive", "hierarchical", "non_cuda_aware", "two_dimensional"):
    with create_communicator(name, topology="2x3") as comm:
        array = np.full(36 * 10_000, comm.rank + 1.0, "f4")
        comm.allreduce_arrays([array])
        rows[name] = comm.allgather_obj(comm.sent_bytes)
if comm.rank == 0:
    print(json.dumps(rows))
"""


@pytest.mark.parametrize(
    "crosses_memory",
    # By NCCL one sends as by MPI.
    [False] if nccl_takes_host_memory() else [True, False],
)
def test_the_named_communicators_send_what_they_promise(crosses_memory):
    env = {"CHAINERMN_NG_CROSS_MEMORY": str(int(crosses_memory))}
    job = run_job(6, ["-c", NAMED], env=env, timeout_s=100)
    assert job.returncode == 0, job.output
    rows = json.loads(job.stdout)
    m, p, g, n = 36 * 10_000 * 4, 6, 3, 2
    for name in ("flat", "naive"):
        assert [sent["world"] for sent in rows[name]] == [2 * (p - 1) * m // p] * p
    for sent in rows["two_dimensional"]:
        assert sent["intra"] == 2 * (g - 1) * m // g
        assert sent["inter"] == 2 * (n - 1) * m // g // n
    for name in ("hierarchical", "non_cuda_aware"):
        intra = [sent["intra"] for sent in rows[name]]
        if crosses_memory:
            # All copy what they add up, the leader the results, and the others those.
            others = (g - 1) * m // g + m
            assert intra == [2 * (g - 1) * m // g, others, others] * 2
        else:
            # Every rank but the leader sends up; every rank but the last sends down.
            assert intra == [m, 2 * m, m] * 2
        inter = [sent.get("inter", 0) for sent in rows[name]]
        assert inter == [2 * (n - 1) * m // n, 0, 0] * 2


BIG = """
import numpy as np
from communicators import available_communicators, create_communicator, TopologyError

for name in available_communicators():
    if name == "single_node":
        continue
    with create_communicator(name, topology="8x4") as comm:
        got = comm.allreduce(np.arange(101.0) + comm.rank)
        assert np.array_equal(got, 32 * np.arange(101.0) + 496), (name, got)
        array = np.full(33, comm.rank, "f4")
        comm.allreduce_arrays([array])
        assert name == "dummy" or (array == 15.5).all(), (name, array)
        assert comm.allreduce_obj(1) == 32
        if comm.rank == 0:
            print(name, "ok")
"""


def test_32_ranks_as_8_hosts_of_4():
    job = run_job(32, ["-c", BIG], timeout_s=110)
    assert job.returncode == 0, job.output
    n_names = len(set(available_communicators()) - {"single_node"})
    assert job.stdout.count("ok") == n_names >= 8, job.output
