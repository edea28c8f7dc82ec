"""The check command: a report and status 0, or a message and another status."""

from __future__ import annotations

import sys

import pytest
from helpers.jobs import mpiexec, run_command, run_job

CHECK = ["-m", "chainermn_ng.check", "--mbytes", "1"]


@pytest.mark.reports("chainer/chainermn#64", "mpi4py/mpi4py#36")
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_a_sound_machine_gets_a_report_and_status_0(n_ranks):
    job = run_job(n_ranks, CHECK)
    assert job.returncode == 0, job.output
    assert f"ranks:    {n_ranks}, hosts: 1" in job.stdout
    for what in ("MPI:", "broadcast large", "pass round a ring", "repeat reductions"):
        assert what in job.stdout, job.output
    assert "average by multi_ring" in job.stdout
    how = "the ranks work in each other's memory" if n_ranks > 1 else "one rank each"
    assert f"in hosts: {how}" in job.stdout
    assert job.stdout.count("all is well") == 1


def test_unequal_hosts_are_told():
    away = {"CHAINERMN_NG_TOPOLOGY": "2+1", "CHAINERMN_NG_CROSS_MEMORY": "0"}
    job = run_job(3, CHECK, env=away)
    assert job.returncode == 0, job.output
    # The third rank is alone on its host.
    by_mpi = "in hosts: by MPI (ranks [0, 1]): CHAINERMN_NG_CROSS_MEMORY=0"
    assert by_mpi in job.stdout, job.output
    assert "two_dimensional                  not for hosts" in job.stdout, job.output
    assert "average by hierarchical" in job.stdout


# Rank 1 runs the same command, but dies, or stops for ever, in one of its patterns.
BAD_RANK = """
import os, signal, sys, time
from chainermn_ng import check
def bad(comm, nbytes):
    {action}
bad.__name__ = "repeat_reductions"
check.PATTERNS = (check.broadcast_large, bad)
check.main(["--mbytes", "1", "--timeout-s", "{limit}"])
"""


def run_with_bad_rank(action: str, limit: int):
    bad = [sys.executable, "-c", BAD_RANK.format(action=action, limit=limit)]
    good = [sys.executable, *CHECK, "--timeout-s", str(limit)]
    return run_command([mpiexec(), "-n", "1", *good, ":", "-n", "1", *bad])


def test_a_rank_that_dies_ends_the_check():
    job = run_with_bad_rank("os.kill(os.getpid(), signal.SIGKILL)", 30)
    assert job.returncode != 0, job.output
    assert "all is well" not in job.stdout
    assert job.seconds < 20, job.output


@pytest.mark.reports(
    "chainer/chainermn#221", "chainer/chainer#7093", "chainer/chainermn#217"
)
def test_a_rank_that_hangs_is_named_with_the_pattern():
    job = run_with_bad_rank("time.sleep(100)", 3)
    assert job.returncode != 0, job.output
    assert "ranks [1] of 2 did not come" in job.stderr, job.output
    assert "broadcast_obj" in job.stderr or "bcast_obj" in job.stderr, job.output
