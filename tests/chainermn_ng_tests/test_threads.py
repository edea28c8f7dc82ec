"""The ranks of a host divide its cores."""

from __future__ import annotations

import json

import pytest
from helpers.jobs import run_job

from chainermn_ng.threads import fair_share

CODE = """
import json, os, sys
import numpy as np
import chainermn_ng, threadpoolctl
comm = chainermn_ng.create_communicator("flat")
threads = {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
rows = comm.allgather_obj([sorted(threads), os.environ.get("OMP_NUM_THREADS")])
if comm.rank == 0:
    print(json.dumps([sorted(os.sched_getaffinity(0)), rows]))
"""


@pytest.mark.parametrize(
    ("mine", "others", "share"),
    [
        ({0, 1, 2, 3}, [{0, 1, 2, 3}], 2),
        ({0, 1}, [{0, 1}] * 3, 1),
        ({0, 1}, [{2, 3}], 2),
        ({0}, [{1}, {2}], 1),
        ({0, 1, 2}, [{2, 3, 4}], 2),
        (set(range(8)), [], 8),
        ({0, 1, 2}, [{0, 1, 2}, {0, 1, 2}], 1),
    ],
)
def test_a_core_that_several_ranks_may_use_counts_in_parts(mine, others, share):
    cores = frozenset(mine)
    assert fair_share(cores, [cores, *map(frozenset, others)]) == share


def run(n_ranks: int, threads: str) -> tuple[list[int], list[list[object]]]:
    job = run_job(
        n_ranks,
        ["-c", CODE],
        env={"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
    )
    assert job.returncode == 0, job.output
    return json.loads(job.stdout)


def test_two_ranks_take_half_of_the_cores_each():
    cores, rows = run(2, "")
    expected = max(1, len(cores) // 2)
    assert rows == [[[expected], str(expected)]] * 2


def test_what_the_user_has_set_is_kept():
    _, rows = run(2, "3")
    assert [row[1] for row in rows] == ["3", "3"]
    # A library may refuse more threads than the machine has cores.
    assert all(row[0] and max(row[0]) <= 3 for row in rows)


def test_one_rank_keeps_all_cores():
    cores, rows = run(1, "")
    assert rows == [[[len(cores)], ""]] or rows == [[[len(cores)], None]]
