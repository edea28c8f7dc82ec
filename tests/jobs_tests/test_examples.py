"""The examples run as their docstrings say."""

from __future__ import annotations

import pathlib
import re

import pytest
from helpers.jobs import REPOSITORY, JobResult, run_command, run_job

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

EXAMPLES = pathlib.Path(REPOSITORY) / "examples" / "mnist"
PORT = str(EXAMPLES / "train_mnist.py")
SINGLE = str(EXAMPLES / "train_mnist_single.py")


def shown(job: JobResult) -> str:
    """Return what a job printed, without the progress bar's terminal codes."""
    return re.sub(r"\x1b\[\d*[A-Z]", "", job.stdout)


def accuracy(job: JobResult) -> float:
    """Return the accuracy that a finished job printed."""
    assert job.returncode == 0, job.output
    (text,) = re.findall(r"^validation accuracy: ([\d.]+)$", shown(job), re.M)
    return float(text)


def digests(job: JobResult) -> list[str]:
    """Return the digests of parameters that a finished job printed."""
    return re.findall(r"^parameters .*: (\w{64})$", shown(job), re.M)


@pytest.mark.parametrize("communicator", ["naive", "hierarchical"])
def test_port_on_two_ranks(communicator, tmp_path):
    argv = [PORT, "--smoke", "--communicator", communicator, "--out", str(tmp_path)]
    job = run_job(2, argv)
    assert accuracy(job) > 0.3
    assert len(digests(job)) == 2
    assert len(set(digests(job))) == 1


def test_port_with_double_buffering(tmp_path):
    argv = [PORT, "--smoke", "--double-buffering", "--out", str(tmp_path)]
    job = run_job(2, argv)
    assert accuracy(job) > 0.3
    assert len(digests(job)) == 2
    assert len(set(digests(job))) == 1
    assert "never applied" not in job.stderr, job.output


def test_demo_learns_and_rank_0_alone_reports(tmp_path):
    argv = [PORT, "--communicator", "multi_ring", "--expect-accuracy", "0.95"]
    topology = {"CHAINERMN_NG_TOPOLOGY": "2x2"}
    argv += ["--out", str(tmp_path)]
    job = run_job(4, argv, timeout_s=110, env=topology)
    assert accuracy(job) >= 0.95
    assert len(digests(job)) == 4
    assert len(set(digests(job))) == 1
    text = shown(job)
    assert text.count("epoch       main/loss") == 1
    assert "this epoch [#" in text
    epochs = re.findall(r"^(\d+) +(?:[\d.e-]+ +){5}$", text, re.M)
    assert epochs == [str(epoch) for epoch in range(1, 21)]


def test_first_steps_equal_the_single_process(tmp_path):
    """The port's first report, from two ranks, is near that of one process.

    The latter is a script without a communicator, run by the launcher.
    """
    common = ["--smoke", "--out", str(tmp_path)]
    one = run_job(1, ["-m", "chainermn_ng", SINGLE, *common])
    two = run_job(2, [PORT, *common])
    assert accuracy(one) > 0.3
    assert len(digests(two)) == 2
    assert len(set(digests(two))) == 1
    # Other shuffles, same batch size and initial weights: not equal, but near.
    assert accuracy(one) == pytest.approx(accuracy(two), abs=0.1)


def test_missed_accuracy_fails(tmp_path):
    argv = [PORT, "--smoke", "--expect-accuracy", "1.1", "--out", str(tmp_path)]
    job = run_job(2, argv)
    assert job.returncode != 0
    assert "expected at least 1.1" in job.stderr


def test_unknown_communicator_lists_the_known_ones():
    job = run_job(1, [PORT, "--communicator", "tree"])
    assert job.returncode != 0
    assert "multi_ring" in job.stderr


def test_help_needs_no_mpiexec():
    import sys

    done = run_command([sys.executable, PORT, "--help"])
    assert done.returncode == 0
    assert "--communicator" in done.stdout
