import gc
import pathlib

import numpy as np
import pytest
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

from communicators import create_communicator


def shared_files():
    """Return the inodes of the shared memory that this process maps."""
    gc.collect()
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:chainermn_ng" in line]


@pytest.mark.parallel([1, 2, 3, 4])
@pytest.mark.parametrize("n_hosts", [1, 2])
def test_all_ranks_see_what_one_writes_whatever_is_pretended(n_hosts):
    hosts = [str(rank % n_hosts) for rank in range(create_size())]
    with create_communicator("naive", topology=hosts, timeout_s=60) as comm:
        memory = comm.allocate_on_host(3 * comm.size)
        ok = memory.dtype == np.uint8 and memory.tolist() == [0] * 3 * comm.size
        comm.barrier()
        memory[comm.rank :: comm.size] = comm.rank + 1
        comm.barrier()
        ok &= memory.tolist() == list(range(1, comm.size + 1)) * 3
        assert_all_ranks(comm, ok, f"{memory}")
        files = comm.allgather_obj(shared_files())
        assert_all_ranks(comm, files == [files[0]] * comm.size, f"{files}")
        assert len(files[0]) == 1
    # It outlives the communicator, and goes with the last view.
    view = memory[1:]
    del memory
    assert len(shared_files()) == 1
    assert view[0] in (1, 2)
    del view
    assert shared_files() == []


def create_size():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


@pytest.mark.parallel([1, 2, 3])
def test_no_bytes_and_bad_sizes(flat):
    assert flat.allocate_on_host(0).size == 0
    last = flat.rank == flat.size - 1
    assert_all_raise(
        flat, lambda: flat.allocate_on_host(-last), ValueError, "allocate_on_host", "-1"
    )
    if flat.size > 1:
        differs = lambda: flat.allocate_on_host(4 + last)  # noqa: E731
        assert_all_raise(flat, differs, ValueError, "4, ", "5]", "one number")
    too_much = 1 << 60
    assert_all_raise(
        flat, lambda: flat.allocate_on_host(too_much), OSError, f"{too_much} bytes"
    )
    assert shared_files() == []
