"""Run the ranks' programs, on this machine or over virtual hosts."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from tests.helpers.hosts import VirtualHosts, run_on_hosts
from tests.helpers.jobs import run_job
from tests.helpers.reports import report_of

from benchmarks.results import BenchmarkError

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def run_program(
    name: str,
    args: Sequence[object],
    *,
    n_ranks: int,
    hosts: VirtualHosts | None = None,
    timeout_s: float = 300.0,
) -> list[Any]:
    """Run ``programs/NAME`` and return what each rank reports.

    Args:
        name: the file's name.
        args: its command line.
        n_ranks: ranks of this machine, or of each of ``hosts``.
        hosts: from ``virtual_hosts``; None for this machine itself.
        timeout_s: time limit in seconds.

    Raises:
        BenchmarkError: it failed or took too long; nothing of it runs any more.
    """
    argv = [str(PROGRAMS / name), *map(str, args)]
    try:
        if hosts is None:
            return report_of(run_job(n_ranks, argv, timeout_s=timeout_s))
        return report_of(run_on_hosts(hosts, n_ranks, argv, timeout_s=timeout_s))
    except AssertionError as error:
        raise BenchmarkError(f"{name} {' '.join(map(str, args))}: {error}") from error
