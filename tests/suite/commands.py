"""Running one command of the suite: its output, its time limit, its counts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

_CLOSING_LINE = re.compile(r"^=* ?(.*\b(?:passed|failed|error|skipped)\b.*) in [\d.]+s")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")

#: Takes lines of output, each with its end of line.
Writer = Callable[[str], object]


@dataclass
class Outcome:
    """What one part did: verdict, counts of tests by word, seconds, reasons."""

    name: str
    verdict: str
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    skips: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Take pytest's closing counts and its reasons for skips out of a line."""
        if line.startswith("SKIPPED "):
            self.skips.append(line.strip().removeprefix("SKIPPED "))
        elif _CLOSING_LINE.match(line):
            for number, word in _COUNT.findall(line):
                word = word.rstrip("s")
                self.counts[word] = self.counts.get(word, 0) + int(number)


@dataclass(frozen=True)
class Command:
    """One process to run, and the time after which it counts as hanging."""

    argv: Sequence[str]
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)


def run(command: Command, outcome: Outcome, write: Writer) -> bool:
    """Run one command; pass on its output, and read the counts out of it.

    Returns:
        bool: whether it ended in time, with status 0.
    """
    write(f"$ {' '.join(command.argv)}\n")
    # Runs of pytest at the same time would clear old folders away under each other.
    with tempfile.TemporaryDirectory(
        prefix="suite-", ignore_cleanup_errors=True
    ) as folder:
        return _run_in(folder, command, outcome, write)


def _run_in(folder: str, command: Command, outcome: Outcome, write: Writer) -> bool:
    """Run one command whose temporary folders lie in ``folder``."""
    process = subprocess.Popen(
        list(command.argv),
        cwd=REPOSITORY,
        env={**_environment(command), "PYTEST_DEBUG_TEMPROOT": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _stop(process)

    # Its end ends the reading below, however silent the process is.
    limit = threading.Timer(command.timeout_s, end)
    limit.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            write(line)
            outcome.read(line)
        returncode = process.wait()
    finally:
        limit.cancel()
    if is_late.is_set():
        write(f"not done within {command.timeout_s:.0f} s: ended\n")
        return False
    return returncode == 0


def _environment(command: Command) -> dict[str, str]:
    """Return what a command runs in: its Python's scripts come first on PATH."""
    scripts = str(pathlib.Path(command.argv[0]).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **command.env}


def _stop(process: subprocess.Popen[str]) -> None:
    """End a command and what it started: politely first, so that mpiexec cleans up."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    # What is left of it holds the pipe open that the output is read from.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
