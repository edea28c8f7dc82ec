"""Checking the arguments of a collective, on all ranks together.

A lone raise would leave the other ranks waiting. So a rank whose arguments are bad
still comes to the agreement, and brings its error along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from communicators.agreement import Agreement
from communicators.errors import CommunicatorError

_T = TypeVar("_T")

#: For collectives that have no root; ``None`` is what a careless caller passes.
NO_ROOT: Any = object()


def enter(
    agreement: Agreement,
    operation: str,
    prepare: Callable[[], _T],
    *,
    size: int,
    root: Any = NO_ROOT,
    max_buf_len: int | None = None,
    compared: Callable[[_T], str] | None = None,
    shown: Callable[[_T], str] | None = None,
) -> _T:
    """Check and prepare this rank's arguments, then agree on the operation.

    Args:
        agreement: of the communicator.
        operation: the collective's name.
        prepare: makes what the collective works on; its ``TypeError``,
            ``ValueError`` or ``CommunicatorError`` is raised on all ranks.
        size: number of ranks.
        root: checked, and the same on all ranks.
        max_buf_len: checked, and the same on all ranks.
        compared: what of that must be equal on all ranks in debug mode.
        shown: what of that errors tell, as it may differ.

    Returns:
        What ``prepare`` returned.

    Raises:
        TypeError, ValueError: bad arguments on some rank; on all ranks.
        MismatchError: the ranks differ.
    """
    error: Exception | None = None
    details = []
    try:
        if root is not NO_ROOT:
            details.append(f"root={root}")
            check_root(root, size, operation)
        if max_buf_len is not None:
            details.append(f"max_buf_len={max_buf_len}")
            check_max_buf_len(max_buf_len, operation)
        prepared = prepare()
        if compared is not None and agreement.is_debugging:
            details.append(compared(prepared))
    except (TypeError, ValueError, CommunicatorError) as failure:
        error = failure
    agreement.check(
        operation,
        ", ".join(details),
        error=error,
        shown=None if shown is None else lambda: shown(prepared),
    )
    return prepared


def check_root(root: Any, size: int, operation: str) -> None:
    """Refuse a root that is no rank.

    Raises:
        ValueError: not an integer in ``0..size-1``.
    """
    if not isinstance(root, int | np.integer) or not 0 <= int(root) < size:
        raise ValueError(
            f"{operation}: root {root!r} is no rank; expected 0 to {size - 1}"
        )


def check_max_buf_len(max_buf_len: Any, operation: str) -> None:
    """Refuse a message size that is none.

    Raises:
        ValueError: not a positive integer.
    """
    if not isinstance(max_buf_len, int | np.integer) or max_buf_len < 1:
        raise ValueError(
            f"{operation}: max_buf_len {max_buf_len!r}: expected 1 or more bytes"
        )


def check_one_per_rank(items: Any, size: int, operation: str, what: str) -> None:
    """Refuse what does not hold one item for each rank.

    Raises:
        TypeError: no sequence.
        ValueError: another number.
    """
    if not hasattr(items, "__len__") or getattr(items, "ndim", 1) == 0:
        raise TypeError(
            f"{operation}: expected {size} {what}, one per rank; got "
            f"{type(items).__qualname__}"
        )
    if len(items) != size:
        raise ValueError(
            f"{operation}: got {len(items)} {what}; expected {size}, one per rank"
        )
