"""Memory beyond model and gradients while ResNet-50's gradients are averaged."""

from __future__ import annotations

from benchmarks.contest import our_candidates, reduce_in_turns
from benchmarks.gradient_shapes import nbytes_of
from benchmarks.jobs import run_program
from benchmarks.results import Row, fastest
from benchmarks.settings import Settings

N_RANKS = 2


def measure(row: Row, settings: Settings) -> None:
    """Fill the row: bytes a rank at the peak, over the bytes of the gradients.

    Of ours counts the fastest, which is the one that the other rows are about.
    """
    ours = [f"ours:{name}" for name in our_candidates(settings, several_hosts=False)]
    rounds = 2 if settings.is_quick else 5
    seconds = reduce_in_turns(ours, "resnet50", rounds=rounds, n_ranks=N_RANKS)
    best = fastest(seconds, ours)
    contenders = [best, "chainermn:naive", "mpi4py:flat", "torch:gloo"]
    why_no_torch = settings.why_no_torch()
    if why_no_torch is not None:
        contenders.remove("torch:gloo")
        row.notes.append(why_no_torch)
    gradient_bytes = nbytes_of("resnet50")
    for name in contenders:
        peak, stays = _measure_one(name)
        if name == best:
            row.ratio = peak / gradient_bytes
            row.ours = (
                f"{name.removeprefix('ours:')} {peak / 1e6:.1f} MB a rank, "
                f"{stays / 1e6:.1f} MB stay"
            )
            row.peers = [f"{gradient_bytes / 1e6:.1f} MB"]
        else:
            row.notes.append(f"{name}: {peak / 1e6:.1f} MB a rank")
    row.notes.append(
        "the buffer that the flat peers reduce is not counted for them, though "
        "gradients have to be copied into it"
    )


def _measure_one(contender: str) -> tuple[float, float]:
    """Return bytes a rank beyond the contender's arrays: at the peak, and left."""
    ranks = run_program("memory.py", [contender], n_ranks=N_RANKS)
    peak, stays = (sum(r[key] for r in ranks) / N_RANKS for key in ("peak", "stays"))
    return peak, stays
