"""Read what a job's ranks report through one line of JSON."""

from __future__ import annotations

import json
from typing import Any

from .jobs import JobResult


def report_of(job: JobResult) -> list[Any]:
    """Return every rank's report, in rank order, of a job that must have succeeded.

    The job prints one line on rank 0: ``REPORT`` and a JSON list with an entry a rank.

    Raises:
        AssertionError: the job failed or did not report; the text holds its output.
    """
    assert job.returncode == 0, job.output
    lines = [line for line in job.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, job.output
    report = json.loads(lines[0].removeprefix("REPORT "))
    assert isinstance(report, list), job.output
    return report
