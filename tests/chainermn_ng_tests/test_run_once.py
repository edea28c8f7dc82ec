import os
import tempfile
import time

import pytest
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.communicators import create_communicator
from chainermn_ng.run_once import run_once_per_host
from communicators import RankFailedError


def temporary_folder(comm):
    path = tempfile.mkdtemp() if comm.rank == 0 else None
    return comm.bcast_obj(path)


def count_run(folder, value=None):
    """Leave a file for each run, as a broken download would leave its parts."""
    number = len(os.listdir(folder))
    with open(os.path.join(folder, f"{number}-{os.getpid()}"), "x"):
        pass
    return value


@pytest.mark.reports("horovod/horovod#2709", "optuna/optuna#362")
@pytest.mark.parallel([1, 2, 3, 4])
def test_one_rank_a_host_runs_and_all_get_the_result(comm):
    folder = temporary_folder(comm)
    for i, given in enumerate((comm, comm.engine, MPI.COMM_WORLD)):
        value = run_once_per_host(given, count_run, folder, value=[1, comm.rank])
        assert_all_ranks(comm, value == [1, 0], f"{value}")
        assert_all_ranks(comm, len(os.listdir(folder)) == i + 1)


@pytest.mark.parallel(4)
def test_each_host_runs_once():
    with create_communicator("naive", topology="a,b,a,b") as comm:
        folder = temporary_folder(comm)
        value = run_once_per_host(comm, count_run, folder, comm.rank)
        comm.barrier()
        ok = value == comm.rank % 2 and len(os.listdir(folder)) == 2
        assert_all_ranks(comm, ok, f"{value}")


@pytest.mark.reports("horovod/horovod#2709", "optuna/optuna#362")
@pytest.mark.parallel([1, 2, 3])
def test_errors_reach_all_ranks(comm):
    def fail(error):
        raise error

    def run(function, *args):
        return lambda: run_once_per_host(comm, function, *args)

    assert_all_raise(comm, run(fail, OSError("checksum")), OSError, "checksum")
    assert_all_raise(comm, run(fail, ValueError("bad")), ValueError, "bad")
    mine = KeyError if comm.rank == 0 else RankFailedError
    assert_all_raise(comm, run(fail, KeyError("name")), mine, "name")


@pytest.mark.parallel([2, 3])
def test_a_result_that_cannot_be_pickled_is_an_error_on_all(comm):
    function = lambda: lambda: 1  # noqa: E731
    assert_all_raise(
        comm,
        lambda: run_once_per_host(comm, function),
        Exception,
        "ickle",
    )


@pytest.mark.parallel([2, 3])
def test_waiting_has_no_time_limit():
    with create_communicator("naive", timeout_s=0.3) as comm:
        assert run_once_per_host(comm, time.sleep, 1.0) is None
        assert comm.allreduce_obj(1) == comm.size
