"""On several ranks: rank 0 prints pytest's report, the others only their failures."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from typing import Any

import pytest
from helpers import fault_matrix
from helpers.jobs import REPOSITORY
from mpi4py import MPI

# What is measured here is not for the programs of whoever runs the tests.
os.environ["CHAINERMN_NG_AUTO_CACHE"] = "0"

RANK = MPI.COMM_WORLD.rank
SIZE = MPI.COMM_WORLD.size

# pytest clears its old folders away: ranks would do so under each other.
_own_folder: tempfile.TemporaryDirectory[str] | None = None
if SIZE > 1:
    _own_folder = tempfile.TemporaryDirectory(
        prefix=f"rank-{RANK}-",
        dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"),
        ignore_cleanup_errors=True,
    )
    os.environ["PYTEST_DEBUG_TEMPROOT"] = _own_folder.name


class _QuietFile(io.StringIO):
    """Takes what the terminal reporter of a rank above 0 writes, and drops it.

    pytest-timeout writes the stacks of a hanging test to the same place, ends the
    process without another word, and starts with a line that says Timeout: from
    there on everything goes to stderr.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passes_on = False

    def write(self, text: str) -> int:
        self._passes_on = self._passes_on or " Timeout " in text
        if self._passes_on:
            sys.__stderr__.write(text)
        return len(text)

    def flush(self) -> None:
        if self._passes_on:
            sys.__stderr__.flush()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Silence the ranks above 0."""
    if RANK > 0:
        config.get_terminal_writer()._file = _QuietFile()


def pytest_unconfigure() -> None:
    """Remove the folder of a rank's temporary folders."""
    if _own_folder is not None:
        _own_folder.cleanup()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure on a rank above 0 at once: later may be never."""
    if RANK > 0 and report.failed:
        print(
            f"\nrank {RANK} of {SIZE}: {report.nodeid} failed in {report.when}\n"
            f"{report.longreprtext}",
            file=sys.__stderr__,
            flush=True,
        )


def pytest_report_header() -> str:
    """Say which MPI library the tests run on."""
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    return f"MPI: {library}; {SIZE} ranks"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what became of the jobs whose ranks failed, if any were run."""
    if fault_matrix.ROWS:
        path = REPOSITORY / "build" / "fault_matrix.md"
        fault_matrix.write(fault_matrix.ROWS, path)
        terminalreporter.section(f"fault matrix, also in {path}")
        terminalreporter.write(fault_matrix.markdown(fault_matrix.ROWS))
