"""How the cost of our own code grows with ranks and with arrays; nothing is sent."""

from __future__ import annotations

import os
import statistics

from benchmarks.jobs import run_program
from benchmarks.results import Table, duration, slowest
from benchmarks.settings import Settings

N_RANKS = (1, 2, 4, 8, 16, 32)
N_ARRAYS = (10, 100, 1_000, 10_000)
#: 4 MiB of float32, however many arrays they are in.
N_ELEMENTS = 1 << 20


def measure_ranks(table: Table, settings: Settings) -> None:
    """Add a line for each number of ranks, all on this machine."""
    n_cores = os.cpu_count() or 1
    for n_ranks in N_RANKS[:3] if settings.is_quick else N_RANKS:
        calls = 10 if settings.is_quick else 50
        ranks = run_program("own_cost.py", ["--calls", calls], n_ranks=n_ranks)
        step_s = statistics.median(slowest([rank["calls"] for rank in ranks]))
        # Where ranks outnumber cores they take turns on them.
        own_s = step_s * min(n_cores, n_ranks) / n_ranks
        create_s = max(rank["create"] for rank in ranks)
        table.lines.append(
            [str(n_ranks), duration(step_s), duration(own_s), duration(create_s)]
        )


def measure_arrays(table: Table, settings: Settings) -> None:
    """Add a line for each number of arrays, on one rank and on two."""
    for n_arrays in N_ARRAYS[:3] if settings.is_quick else N_ARRAYS:
        calls = 10 if settings.is_quick else 50
        args = ["--arrays", n_arrays, "--elements", N_ELEMENTS, "--calls", calls]
        line = [f"{n_arrays:,}"]
        for n_ranks in (1, 2):
            ranks = run_program("own_cost.py", args, n_ranks=n_ranks)
            step_s = statistics.median(slowest([rank["calls"] for rank in ranks]))
            first_s = max(rank["first"] for rank in ranks)
            line += [duration(step_s), duration(first_s)]
        table.lines.append(line)
