"""Chainer models trained over several hosts: equal to one process, or ended clearly."""

import pathlib

import numpy as np
import pytest
from helpers.hosts import run_on_hosts, run_until_failure
from helpers.jobs import run_job
from helpers.reports import report_of

from communicators import available_communicators

PROGRAMS = pathlib.Path(__file__).parent / "programs"
AVERAGING = sorted(set(available_communicators()) - {"single_node", "dummy"})


@pytest.mark.parametrize(
    ("ranks_per_host", "names"),
    [([2, 2], AVERAGING), ([2, 1], ["flat", "hierarchical", "naive"])],
)
def test_training_on_two_hosts_equals_one_process(
    two_hosts, tmp_path, ranks_per_host, names
):
    alone = run_job(1, [PROGRAMS / "train.py", tmp_path / "alone.npz"])
    assert alone.returncode == 0, alone.output
    program = [PROGRAMS / "train.py", tmp_path / "hosts.npz", *names]
    ranks = report_of(run_on_hosts(two_hosts, ranks_per_host, program))
    assert ranks == [dict.fromkeys(names, True)] * sum(ranks_per_host)
    with (
        np.load(tmp_path / "alone.npz") as one,
        np.load(tmp_path / "hosts.npz") as many,
    ):
        paths = [key.removeprefix(":") for key in one]
        assert len(paths) == 6
        assert set(many) == {f"{name}:{path}" for name in names for path in paths}
        for name in names:
            for path in paths:
                np.testing.assert_allclose(
                    many[f"{name}:{path}"],
                    one[f":{path}"],
                    rtol=1e-5,
                    atol=1e-6,
                    err_msg=f"{name} {path}",
                )


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_fails_on_the_other_host_ends_the_training(two_hosts, how):
    program = [PROGRAMS / "train_and_die.py", how]
    job = run_until_failure(two_hosts, 2, program, timeout_s=25)
    assert job.returncode != 0, job.output
    assert "went on" not in job.stdout, job.output
    if how == "raises":
        assert "the data of step 3 are broken" in job.output
