"""Assertions that hold, or fail, on all ranks together."""

from __future__ import annotations

from typing import Any


def assert_all_ranks(comm: Any, ok: bool, message: str = "") -> None:
    """Fail on every rank when any rank's verdict is false, and name those ranks.

    A lone failed assertion would leave the other ranks in their next collective.

    Args:
        comm: anything with ``mpi_comm``.
        ok: this rank's verdict.
        message: what this rank saw; printed for the ranks that failed.
    """
    verdicts = comm.mpi_comm.allgather(None if ok else f"{message}")
    bad = {rank: text for rank, text in enumerate(verdicts) if text is not None}
    assert not bad, f"failed on ranks {bad}"


def same_everywhere(comm: Any, value: Any) -> bool:
    """Tell whether a value looks the same on all ranks. Collective."""
    return len(set(comm.allgather_obj(repr(value)))) == 1
