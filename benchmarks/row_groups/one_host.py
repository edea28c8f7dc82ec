"""The mean of ResNet-50's gradients on this machine, against every peer."""

from __future__ import annotations

from benchmarks.contest import contest, our_candidates
from benchmarks.results import Row, compare
from benchmarks.settings import Settings


def measure(row: Row, settings: Settings, n_ranks: int) -> None:
    """Fill the row for ``n_ranks`` ranks."""
    peers = ["chainermn:naive", "mpi4py:flat", "torch:gloo"]
    why_no_torch = settings.why_no_torch()
    if why_no_torch is not None:
        peers.remove("torch:gloo")
        row.notes.append(why_no_torch)
    candidates = our_candidates(settings, several_hosts=False)
    seconds, ours = contest(settings, candidates, peers, "resnet50", n_ranks=n_ranks)
    compare(row, seconds, ours, peers)
