"""The virtual hosts are apart, joined by cables, and leave nothing behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from helpers.hosts import (
    JobTimeoutError,
    run_on_hosts,
    run_until_failure,
    virtual_hosts,
)
from helpers.jobs import REPOSITORY
from helpers.reports import report_of

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def _network_links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def _is_alive(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("ranks_per_host", [[2, 2], [2, 1], [1, 1]])
def test_hosts_share_no_memory_and_bytes_cross_the_cable(two_hosts, ranks_per_host):
    before = [two_hosts.link_bytes(i).sent for i in (0, 1)]
    job = run_on_hosts(two_hosts, ranks_per_host, [PROGRAMS / "plain_mpi.py"])
    ranks = report_of(job)
    placed = [
        (name, intra_rank, n)
        for name, n in zip(two_hosts.names, ranks_per_host, strict=True)
        for intra_rank in range(n)
    ]
    assert [(r["host"], r["intra_rank"], r["intra_size"]) for r in ranks] == placed
    for i in (0, 1):
        # Each host must at least tell the other its sum, whatever the algorithm.
        sent = ranks[i * ranks_per_host[0]]["sent"]
        assert sent >= ranks[0]["nbytes"]
        assert two_hosts.link_bytes(i).sent - before[i] >= sent


def test_rate_limits_the_cable():
    with virtual_hosts(2, rate="200mbit") as hosts:
        ranks = report_of(run_on_hosts(hosts, 1, [PROGRAMS / "plain_mpi.py"]))
    # A lower bound holds on a loaded machine too; the burst passes unhindered.
    least_s = (ranks[0]["nbytes"] - (128 << 10)) * 8 / 200e6
    assert min(rank["seconds"] for rank in ranks) >= least_s


def test_hosts_know_each_other_by_name(two_hosts):
    code = "import socket, sys; print([socket.gethostbyname(n) for n in sys.argv[1:]])"
    job = run_on_hosts(two_hosts, [1, 0], ["-c", code, *two_hosts.names])
    assert job.stdout.strip() == "['10.77.0.2', '10.77.0.3']", job.output


def test_a_killed_rank_on_the_other_host_ends_the_job(two_hosts):
    job = run_until_failure(two_hosts, [2, 1], [PROGRAMS / "die.py"])
    assert job.returncode != 0, job.output


def test_a_job_that_outlives_its_time_is_ended_and_the_hosts_serve_on(two_hosts):
    code = "import sys, time; print('I sleep', flush=True); time.sleep(600)"
    with pytest.raises(JobTimeoutError, match="did not end within 8 s") as caught:
        run_on_hosts(two_hosts, [1, 2], ["-c", code], timeout_s=8)
    assert "I sleep" in str(caught.value)
    ranks = [line for line in caught.value.running if line.endswith("time.sleep(600)")]
    assert len([r for r in ranks if f": {sys.executable} -c" in r]) == 3, ranks
    assert two_hosts.processes() == []
    job = run_on_hosts(two_hosts, 1, ["-c", "print('again')"], timeout_s=30)
    assert job.stdout.count("again") == 2, job.output


def test_processes_that_a_job_leaves_behind_are_ended(two_hosts):
    # One that kept the job's output open would be part of the job.
    code = (
        "from subprocess import *\n"
        "Popen(['setsid', 'sleep', '600'], stdout=DEVNULL, stderr=DEVNULL)"
    )
    job = run_on_hosts(two_hosts, 1, ["-c", code], timeout_s=30)
    assert job.returncode == 0, job.output
    assert two_hosts.processes() == []


def test_an_exception_removes_the_hosts_and_the_machine_stays_as_it_was():
    links = _network_links()
    keepers, directories = [], []

    def fail_with_hosts() -> None:
        with virtual_hosts(2) as hosts:
            keepers.extend(host.pid for host in hosts.namespaces)
            directories.append(hosts.directory)
            assert _network_links() == links
            raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"):
        fail_with_hosts()
    assert len(keepers) == 3
    assert not any(map(_is_alive, keepers))
    assert not directories[0].exists()
    assert _network_links() == links


def test_a_host_that_cannot_be_made_takes_the_others_with_it():
    links = _network_links()
    with (
        pytest.raises(RuntimeError, match="tbf"),
        virtual_hosts(2, rate="a snail's pace"),
    ):
        pass
    assert _network_links() == links


def _mentions(text: str) -> list[str]:
    """Return the command lines of running processes that contain ``text``."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                found.append(command)
    return found


def test_hosts_go_when_their_maker_is_killed():
    maker = """
        import sys, time
        from tests.helpers.hosts import run_on_hosts, virtual_hosts
        with virtual_hosts(2) as hosts:
            print(*[n.pid for n in hosts.namespaces], hosts.directory, flush=True)
            code = "import time; print('up', flush=True); time.sleep(600)"
            run_on_hosts(hosts, 1, ["-c", code], timeout_s=60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(maker)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    with process:
        *keepers, directory = process.stdout.readline().split()
        time.sleep(2)  # the job is starting or has started: both must go
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    # The launcher names the agent, which lies in the directory.
    while any(_is_alive(int(pid)) for pid in keepers) or _mentions(directory):
        assert time.monotonic() < deadline, f"{keepers}, {_mentions(directory)} live on"
        time.sleep(0.05)
    subprocess.run(["rm", "-r", "--", directory], check=True)


@pytest.mark.parametrize("ranks_per_host", [[1], [1, 1, 1]])
def test_ranks_for_another_number_of_hosts_are_an_error(two_hosts, ranks_per_host):
    with pytest.raises(ValueError, match="2 hosts"):
        run_on_hosts(two_hosts, ranks_per_host, ["-c", "pass"])
