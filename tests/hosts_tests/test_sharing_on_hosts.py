"""Data of which each host holds one copy."""

import pathlib

import pytest
from helpers.hosts import run_on_hosts
from helpers.reports import report_of

PROGRAMS = pathlib.Path(__file__).parent / "programs"


@pytest.mark.parametrize("ranks_per_host", [[2, 1], [1, 2]])
def test_each_host_has_one_copy_of_its_own(two_hosts, ranks_per_host):
    job = run_on_hosts(two_hosts, ranks_per_host, [PROGRAMS / "share.py"])
    ranks = report_of(job)
    assert [rank[:2] for rank in ranks] == [[True, False]] * 3
    first = ranks[: ranks_per_host[0]]
    second = ranks[ranks_per_host[0] :]
    for at in (2, 3):
        here = [tuple(rank[at]) for rank in first]
        there = [tuple(rank[at]) for rank in second]
        assert all(len(files) == 1 for files in here + there)
        # The same file for all ranks of a host, another one on the other host.
        assert len(set(here)) == len(set(there)) == 1
        assert here[0] != there[0]
