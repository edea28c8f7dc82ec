"""How long a rank waits for the others."""

from __future__ import annotations

import math
from typing import Any

#: Seconds.
DEFAULT_TIMEOUT_S = 600.0


def check_timeout(timeout_s: Any) -> None:
    """Refuse a time limit that is none.

    Raises:
        ValueError: neither ``None`` (no limit) nor a positive number of seconds.
    """
    is_number = isinstance(timeout_s, int | float) and not math.isnan(timeout_s)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise ValueError(f"timeout_s {timeout_s!r}: expected a positive number or None")
