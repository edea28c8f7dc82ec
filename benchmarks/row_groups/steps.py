"""Steps of the digits example: what the package adds, and what the agreement adds."""

from __future__ import annotations

import statistics

from benchmarks.jobs import run_program
from benchmarks.results import Row, duration, quartiles, slowest
from benchmarks.settings import Settings

#: Two sizes of the example's model: in the small one every microsecond shows.
STEPS_BY_UNITS = {200: 1000, 1000: 300}


def measure_one_rank(row: Row, settings: Settings) -> None:
    """Fill the row: a step with the package on one rank over one without it."""
    for units, n_steps in STEPS_BY_UNITS.items():
        args = ["--steps", 50 if settings.is_quick else n_steps, "--unit", units]
        (times,) = run_program("step_cost.py", args, n_ranks=1)
        ours, alone = (statistics.median(times[name]) for name in ("ours", "alone"))
        if row.ratio is None:
            row.seconds = times
            row.ours = f"step {duration(ours)}"
            row.peers = [duration(alone)]
            row.ratio = ours / alone
            pairs = zip(times["ours"], times["alone"], strict=True)
            row.spread = quartiles([a / b for a, b in pairs])
        else:
            row.notes.append(
                f"with layers of {units} units instead of 200: {duration(ours)} "
                f"against {duration(alone)}, ratio {ours / alone:.3f}"
            )


def measure_agreement(row: Row, settings: Settings) -> None:
    """Fill the row: a step with the agreement over one without it, on 2 ranks.

    What it adds is the median of the differences within pairs of neighbours: it is
    less than what steps vary by.
    """
    n_steps = 100 if settings.is_quick else 1500
    ranks = run_program("agreement_cost.py", ["--steps", n_steps], n_ranks=2)
    kinds = ("agreed", "trusting")
    agreed, trusting = (slowest([rank[kind] for rank in ranks]) for kind in kinds)
    added_s = statistics.median(a - b for a, b in zip(agreed, trusting, strict=True))
    trusting_s = statistics.median(trusting)
    row.seconds = {"agreed": agreed, "trusting": trusting}
    row.ours = f"step {duration(statistics.median(agreed))}"
    row.peers = [duration(trusting_s)]
    row.ratio = 1 + added_s / trusting_s
    row.notes.append(f"the agreement adds {added_s * 1e6:.0f} us")
