"""Errors that are expected on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.ranks import assert_all_ranks


def raised_by(function: Callable[[], Any]) -> Exception | None:
    """Return the exception that a call raises, if any."""
    try:
        function()
    except Exception as error:
        return error
    return None


def assert_all_raise(
    comm: Any, function: Callable[[], Any], error_type: type, *texts: str
) -> None:
    """Expect an error of one type on every rank, and the ranks in step after it.

    Args:
        comm: anything with ``mpi_comm`` and ``allreduce_obj``.
        function: collective; called on all ranks.
        error_type: what each rank must raise.
        texts: what each rank's message must hold.
    """
    error = raised_by(function)
    message = f"{type(error).__name__}: {error}"
    ok = isinstance(error, error_type) and all(text in str(error) for text in texts)
    assert_all_ranks(comm, ok, message)
    assert comm.allreduce_obj(1) == comm.size
