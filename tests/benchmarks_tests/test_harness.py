"""The command runs; how fast anything is, is not tested."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from helpers.hosts import virtual_hosts, why_no_hosts
from helpers.jobs import REPOSITORY, job_environment, run_command

from benchmarks import run
from benchmarks.links import CABLE, link_rate
from benchmarks.results import BenchmarkError, NotHere, Row
from benchmarks.rows import COMPARISONS
from benchmarks.settings import Settings

COMMAND = [sys.executable, "-m", "benchmarks.run"]
_WHY_NO_LINKS = why_no_hosts() or (
    None if shutil.which("iperf3") else "iperf3 is missing"
)


def test_a_row_on_one_host_is_measured(tmp_path):
    results = tmp_path / "results.json"
    options = ["--only", "one-host-2", "--without-torch", "--communicator", "flat"]
    options += ["--quick", "--rounds", "2", "--json", str(results)]
    job = run_command([*COMMAND, *options], cwd=REPOSITORY)
    assert job.returncode == 0, job.output
    everything = json.loads(results.read_text())
    (row,) = everything["rows"]
    assert set(row["seconds"]) == {"ours:flat", "chainermn:naive", "mpi4py:flat"}
    assert {len(seconds) for seconds in row["seconds"].values()} == {2}
    assert row["ratio"] > 0
    assert row["skipped"] is None
    assert row["notes"] == ["torch: left out by --without-torch"]
    assert everything["machine"]["chainer"] == "7.8.1"
    assert "| `one-host-2` mean of ResNet-50's gradients, one host, 2 ranks | flat" in (
        job.stdout
    )


def test_the_memory_of_a_flat_reduction_is_seen():
    program = REPOSITORY / "benchmarks" / "programs" / "memory.py"
    # One rank packs only if the wire has another dtype.
    ours = "ours:flat:bucket_bytes=33554432,allreduce_grad_dtype=float16"
    command = [sys.executable, str(program), ours]
    job = run_command([*command, "--gradients", "16MiB"], cwd=REPOSITORY)
    assert job.returncode == 0, job.output
    (entry,) = json.loads(job.stdout.removeprefix("REPORT "))
    # It packs the whole set into one buffer of halves, in place of 32 MiB for more.
    assert 8 << 20 <= entry["stays"] <= entry["peak"] < 16 << 20


def test_a_wrong_result_is_no_measurement():
    code = (
        "from benchmarks.programs import contenders\n"
        "flat = contenders.FlatMPI('flat', [(3, 2)])\n"
        "flat.fill(); flat.reduce(); flat.check(1)\n"
        "flat.arrays()[0][-1] += 1; flat.check(1)\n"
    )
    job = run_command([sys.executable, "-c", code], cwd=REPOSITORY)
    assert job.returncode != 0
    assert "ValueError: FlatMPI: 2.0, not 1.0" in job.stderr


@pytest.mark.parametrize(
    ("error", "failed"),
    [(NotHere("no root"), False), (BenchmarkError("exit 1"), True), (KeyError(), True)],
)
def test_a_row_that_cannot_be_measured_says_why(error, failed, capsys):
    def fill(_row: Row, _settings: Settings) -> None:
        raise error

    row = Row("key", "what", "peers", 0.5)
    run.measure(row, fill, Settings())
    assert row.failed is failed
    assert row.ratio is None
    assert row.skipped is not None
    assert (str(error) or "KeyError") in row.skipped
    assert capsys.readouterr().err.startswith("key ...")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--only", "nothing"], "no row 'nothing'; known: one-host-2,"),
        (["--communicator", "flatt"], "unknown communicator 'flatt'"),
        (["--communicator", "flat:no=1"], "communicator 'flat' has no option 'no'"),
        (["--communicator", "flat:no"], "option 'no': expected KEY=VALUE"),
        (["--communicator", "mpi"], "MPI's own always takes part"),
        (["--quick", "--write-docs"], "--write-docs needs a whole run"),
        (["--only", "small", "--write-docs"], "--write-docs needs a whole run"),
    ],
)
def test_wrong_options_are_refused(options, complaint, capsys):
    with pytest.raises(SystemExit):
        run.main(options)
    assert complaint in capsys.readouterr().err


def test_rows_are_chosen_by_the_beginning_of_their_names():
    assert run.chosen([]) == run.KEYS
    assert run.chosen(["two-hosts", "import"]) == [
        "two-hosts-16mib",
        "two-hosts-resnet50",
        "import",
    ]


def test_goals_are_those_that_the_project_set_itself():
    goals = {key: comparison.goal for key, comparison in COMPARISONS.items()}
    assert goals == {
        "one-host-2": 0.50,
        "one-host-4": 0.55,
        "two-hosts-16mib": 1.12,
        "two-hosts-resnet50": 1.12,
        "four-hosts-16mib": 1.15,
        "four-hosts-resnet50": 1.15,
        "small": 1.10,
        "one-rank-step": 1.02,
        "agreement": 1.01,
        "overlap": 1.15,
        "memory": 0.3,
        "import": 1.10,
    }


@pytest.mark.skipif(_WHY_NO_LINKS is not None, reason=str(_WHY_NO_LINKS))
def test_the_rate_of_a_shaped_link_is_measured():
    with virtual_hosts(2, rate=CABLE) as hosts:
        rate = link_rate(hosts, seconds=1)
        assert hosts.processes() == []
    # Never more than the cable lets through, and not next to nothing.
    assert 1e6 < rate < 125e6


@pytest.mark.skipif(_WHY_NO_LINKS is not None, reason=str(_WHY_NO_LINKS))
def test_an_interrupted_run_leaves_no_hosts(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--only", "two-hosts-16mib", "--quick"],
        cwd=REPOSITORY,
        env=job_environment({"TMPDIR": str(tmp_path)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # With both hosts running, the script that stands in for ssh is written.
        wait_for(lambda: any(tmp_path.glob("hosts-*/agent")))
        keepers = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert len(keepers) >= 3  # of the hosts and of the switch
    wait_for(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in keepers))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_command_takes_its_processes_along():
    code = "import subprocess; subprocess.run(['sleep', '100'])"
    before = signal.signal(signal.SIGALRM, raise_interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_command([sys.executable, "-c", code])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert children_of(os.getpid()) == []


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Return the processes that this one started, by any of its threads."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split()]
