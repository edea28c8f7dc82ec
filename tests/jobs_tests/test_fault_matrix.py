"""What fails, where: each cell is a job of 2 ranks whose rank 1 fails.

The table of all cells is printed at the end of the tests and written to
``build/fault_matrix.md``.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from helpers import fault_matrix
from helpers.jobs import JobResult, is_open_mpi, run_job

PROGRAM = pathlib.Path(__file__).parent / "programs" / "faults.py"
#: From the failure to the end of the job; where ranks wait for one that does not come,
#: from the end of the time limit that the program sets.
LIMIT_S = 10.0
TIMEOUT_S = 4.0
AT_A_TIME = 2

FAILED = -1  # any status but 0


@dataclass(frozen=True)
class Cell:
    """One job and what is expected of it.

    Attributes:
        what, where: arguments of the program.
        status: of the job.
        texts: each must have been shown by some rank.
    """

    what: str
    where: str
    status: int = FAILED
    texts: Sequence[str] = ()


RAISED = ("Broken: by the user's code", "rank 1 of 2")
CELLS = [
    Cell("exception", "before the communicator", 1, RAISED),
    Cell("sys.exit(3)", "before the communicator", 3, ["rank 1 of 2"]),
    Cell("exception", "user code", 1, RAISED),
    Cell("exception, caught", "user code", 0, ["caught", "trained to iteration 8"]),
    Cell("exception in a thread", "user code", 1, RAISED),
    Cell("sys.exit(3)", "user code", 3, ["rank 1 of 2", "sys.exit(3)"]),
    Cell("os._exit(0)", "user code", 1, ["rank 1: leaving the program"]),
    Cell("os._exit(3)", "user code", 3, ["rank 1 of 2", "os._exit(3)"]),
    Cell("KeyboardInterrupt", "user code", 130, ["rank 1 of 2", "KeyboardInterrupt"]),
    Cell("SIGTERM", "user code"),
    Cell("SIGKILL", "user code"),
    Cell("stuck", "user code", 1, ["ranks [1] of 2 did not come", "faults.py:"]),
    Cell("skipped step", "user code", 1, ["different operations", "on rank 1"]),
    Cell("other shape", "user code", 1, ["(3, 4)", "(4, 4)", "on rank 1", "/W"]),
    Cell("exception", "extension", 1, RAISED),
    Cell("sys.exit(3)", "extension", 3, ["rank 1 of 2"]),
    Cell("call on one rank", "extension", 1, ["rank 1: allreduce of", "faults.py:"]),
    Cell("exception", "evaluator", 1, RAISED),
    Cell("SIGKILL", "evaluator"),
    Cell("stuck", "evaluator", 1, ["ranks [1] of 2 did not come"]),
    Cell("exception", "collective", 1, ["allgather_obj failed on rank 1", "Broken"]),
    Cell("os._exit(3)", "collective", 3, ["rank 1 of 2"]),
    Cell("SIGKILL", "collective"),
    Cell("other shape", "collective", 1, ["shape (3,)", "shape (4,)", "faults.py:"]),
    Cell("exception", "snapshot", 1, ["Broken", "rank 1"]),
    Cell("SIGKILL", "snapshot's file"),
    Cell("full disk", "snapshot", 1, ["OSError", "rank 1"]),
    Cell("read-only folder", "snapshot", 1, ["OSError", "rank 1", "/proc"]),
    Cell("damaged snapshot", "snapshot", 0, ["run.1.4", "trained to iteration 8"]),
]


@dataclass(frozen=True)
class Outcome:
    """A job that has ended: its result, each rank's output, and how long it took."""

    job: JobResult
    outputs: Sequence[str]
    seconds: float

    @property
    def text(self) -> str:
        """Everything, for messages of failed tests."""
        return "\n".join([*self.outputs, self.job.output, f"{self.seconds:.1f} s"])


def run_cell(cell: Cell, folder: pathlib.Path) -> Outcome:
    """Run one job; measure from the moment of the failure."""
    argv = ["-W", "default", PROGRAM, cell.what, cell.where, folder]
    job = run_job(2, argv, timeout_s=60)
    ended_at = time.time()
    outputs = [(folder / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    failed_at = float((folder / "failed_at").read_text())
    return Outcome(job, outputs, ended_at - failed_at)


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[Outcome]]]:
    """The jobs of all cells that were selected, a few of them at a time."""
    cells = [
        item.callspec.params["cell"]
        for item in request.session.items
        if item.path == request.path and "cell" in item.callspec.params
    ]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {
            (cell.what, cell.where): pool.submit(
                run_cell, cell, tmp_path_factory.mktemp("cell")
            )
            for cell in cells
        }


@pytest.mark.skipif(is_open_mpi(), reason="the same under MPICH; the cells take long")
@pytest.mark.timeout(300)
@pytest.mark.reports("chainer/chainermn#236", "mpi4py/mpi4py#290", "NanoComp/meep#1180")
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.what}-{cell.where}")
def test_job_ends(cell, outcomes):
    outcome = outcomes[cell.what, cell.where].result()
    shown = [fault_matrix.telling_line(output) for output in outcome.outputs]
    shown.append(fault_matrix.telling_line_of_mpiexec(outcome.job.output))
    status = outcome.job.returncode
    row = fault_matrix.Row(cell.what, cell.where, status, outcome.seconds, shown)
    fault_matrix.ROWS.append(row)
    if cell.status == FAILED:
        assert status != 0, outcome.text
    else:
        assert status == cell.status, outcome.text
    limit_s = LIMIT_S + (TIMEOUT_S if cell.what == "stuck" else 0)
    assert outcome.seconds < limit_s, outcome.text
    for text in cell.texts:
        assert any(text in output for output in outcome.outputs), outcome.text
    if cell.status != 0:
        assert sum("ends the job" in output for output in outcome.outputs) <= 1
