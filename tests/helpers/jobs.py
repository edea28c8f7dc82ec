"""Run whole programs on several ranks, in a clean environment and a time limit."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# A process that has initialised MPI, or that mpiexec started, carries variables
# that would make a nested mpiexec believe it is one of its own ranks.
_MPI_PREFIXES = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL")


@dataclass(frozen=True)
class JobResult:
    """What a finished job left: exit status, output texts, and its duration."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        """Both texts, for messages of failed tests."""
        return f"exit {self.returncode}\n{self.stdout}\n--- stderr\n{self.stderr}"


def job_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without MPI's variables, with ours added."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_MPI_PREFIXES)}
    clean["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    )
    # Several ranks share few cores in tests; one thread each keeps them from
    # fighting for them.
    clean.setdefault("OMP_NUM_THREADS", "1")
    clean.setdefault("OPENBLAS_NUM_THREADS", "1")
    if is_open_mpi():
        clean.update(open_mpi_environment())
    clean.update(env or {})
    return clean


def open_mpi_environment() -> dict[str, str]:
    """Settings that let Open MPI run as root with more ranks than cores."""
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_osc": "^ucx",
    }


def is_open_mpi() -> bool:
    """Tell whether mpi4py runs on Open MPI here."""
    from mpi4py import MPI

    return "Open MPI" in MPI.Get_library_version()


def mpiexec() -> str:
    """Return the mpiexec beside this Python, else the one on PATH."""
    beside = pathlib.Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return str(beside)
    found = shutil.which("mpiexec")
    if found is None:
        raise RuntimeError("no mpiexec beside this Python and none on PATH")
    return found


def run_command(
    command: Sequence[str],
    *,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> JobResult:
    """Run a command; kill its whole process group if it outlives ``timeout_s``.

    Raises:
        AssertionError: it did not end in time; the text holds what it printed.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=job_environment(env),
        cwd=cwd,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # mpiexec ends its ranks when asked politely; the group kill follows.
        process.terminate()
        try:
            stdout, stderr = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        raise AssertionError(
            f"{' '.join(command)} did not end within {timeout_s} s\n{stdout}\n{stderr}"
        ) from None
    except BaseException:
        # Interrupted; in its own session, it would not hear of that.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return JobResult(process.returncode, stdout, stderr, time.monotonic() - start)


def run_job(
    n_ranks: int,
    argv: Sequence[str],
    *,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> JobResult:
    """Run ``python *argv`` on ``n_ranks`` ranks, e.g. ``["-c", code]``."""
    command = [mpiexec(), "-n", str(n_ranks), sys.executable, *map(str, argv)]
    return run_command(command, timeout_s=timeout_s, env=env, cwd=cwd)
