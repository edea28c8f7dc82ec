import functools
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from helpers.jobs import mpiexec, run_command
from helpers.reports import report_of

PROGRAM = pathlib.Path(__file__).parent / "programs" / "full_disk.py"


@functools.cache
def why_no_private_mounts():
    if os.geteuid() != 0:
        return "mounting a small disk needs root"
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "mounting a small disk needs unshare and mount (util-linux)"
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return None if probe.returncode == 0 else f"mounts: {probe.stderr.strip()}"


def test_full_and_read_only_disk_is_an_error_on_all_ranks(tmp_path):
    reason = why_no_private_mounts()
    if reason is not None:
        pytest.skip(reason)
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path)]
    command += [mpiexec(), "-n", "2", sys.executable, str(PROGRAM), str(tmp_path)]
    reports = report_of(run_command(command, timeout_s=60))
    files = ["run.0.2", "run.1.2"]
    for report in reports:
        kind, text = report["full"]
        assert kind == "OSError"
        assert "failed on rank 1: OSError: [Errno 28] No space left" in text
        assert report["after"] == [2, 2.0, files]
        kind, text = report["read-only"]
        assert kind == "OSError"
        for rank in (0, 1):
            assert f"on rank {rank}: OSError: [Errno 30] Read-only file system" in text
        assert report["at last"] == [
            6,
            6.0,
            ["run.0.2", "run.0.6", *files[1:], "run.1.6"],
        ]
