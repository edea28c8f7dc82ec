"""Scripts written for ChainerMN 5 to 7 run unchanged, and say what they need."""

from __future__ import annotations

import pathlib

import pytest
from helpers.jobs import run_job

SCRIPTS = pathlib.Path(__file__).parent / "old_scripts"
MESSAGE = "What asks for a GPU runs on the CPU (--cpu-fallback or "


def run(script, *args, options=(), n_ranks=2, env=None):
    argv = ["-m", "chainermn_ng", *options, SCRIPTS / script, *args]
    return run_job(n_ranks, argv, timeout_s=90, env=env)


def results_of(job):
    """Return the digest of the weights and the accuracy of each rank."""
    assert job.returncode == 0, job.output
    lines = [line.split() for line in job.stdout.splitlines() if "RESULT" in line]
    assert sorted(line[1] for line in lines) == ["0", "1"], job.output
    return [(line[2], float(line[3])) for line in sorted(lines)]


def assert_trained_together(job):
    (first, accuracy), (second, other) = results_of(job)
    assert first == second, job.output
    assert accuracy == other > 0.9, job.output


@pytest.mark.parametrize("communicator", ["hierarchical", "two_dimensional"])
@pytest.mark.reports("chainer/chainermn#22", "chainer/chainermn#125")
def test_data_parallel_of_version_5(tmp_path, communicator):
    job = run("data_parallel_v5.py", "--communicator", communicator, "-o", tmp_path)
    assert_trained_together(job)
    assert "validation/main/accuracy" in job.stdout


@pytest.mark.reports("chainer/chainermn#22", "chainer/chainercv#717")
def test_own_loop_of_version_5():
    job = run("own_loop_v5.py", "single_node")
    assert_trained_together(job)
    assert "use multi_node_mean_grad()" not in job.stdout


def test_model_parallel_of_version_6():
    job = run("model_parallel_v6.py")
    results = results_of(job)
    assert results[0][1] > 0.9, job.output


def test_training_of_version_7_resumes(tmp_path):
    job = run("resumed_v7.py", "-e", "2", "-o", tmp_path)
    assert "RESUMED AT 0\n" in job.stdout, job.output
    job = run("resumed_v7.py", "-e", "5", "-o", tmp_path)
    assert "RESUMED AT 16\n" in job.stdout, job.output
    assert_trained_together(job)


@pytest.mark.parametrize(
    ("script", "args"),
    [("data_parallel_v5.py", ["--gpu"]), ("resumed_v7.py", ["-d", "0"])],
)
def test_gpu_flags_are_an_error_that_says_how_to_go_on(tmp_path, script, args):
    job = run(script, *args, "-o", tmp_path)
    assert job.returncode != 0, job.output
    # By the communicator or by Chainer, whichever is asked first.
    hint = (
        "To run what asks for a GPU on the CPU: python -m chainermn_ng --cpu-fallback"
    )
    assert hint in job.stderr, job.output


@pytest.mark.parametrize("way", ["option", "variable"])
def test_gpu_flags_fall_back_to_the_cpu_when_asked(tmp_path, way):
    if way == "option":
        args = ["data_parallel_v5.py", "--gpu"]
        job = run(*args, "-o", tmp_path, options=["--cpu-fallback"])
    else:
        args = ["resumed_v7.py", "-d", "0", "-o", tmp_path]
        job = run(*args, env={"CHAINERMN_NG_CPU_FALLBACK": "1"})
    assert_trained_together(job)
    assert job.stderr.count(MESSAGE) == 1, job.output


def test_a_value_that_is_none_is_an_error():
    job = run("own_loop_v5.py", "naive", env={"CHAINERMN_NG_CPU_FALLBACK": "perhaps"})
    assert job.returncode != 0
    assert "CHAINERMN_NG_CPU_FALLBACK='perhaps': expected 1 (on) or 0" in job.stderr
