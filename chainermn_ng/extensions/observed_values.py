"""Observations as plain numbers that hold nothing of the user's alive."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn_ng.communicators.parameters import to_host


def detached(value: Any) -> Any:
    """Return an observation as a plain value; what was observed stays as it is.

    Args:
        value: number, array or variable, on any device.

    Returns:
        A Python float for a number or an array of one element without dimensions; a
        NumPy array of its own for other arrays; anything else as it is.
    """
    if isinstance(value, chainer.Variable):
        value = value.array
    number = as_float(value)
    if number is not None:
        return number
    if isinstance(value, chainer.get_array_types()):
        host = to_host(value)
        return np.array(host) if host is value else host
    return value


def as_float(value: Any) -> float | None:
    """Return a number, or the only element of an array without dimensions.

    Returns:
        ``None`` for everything else.
    """
    if isinstance(value, chainer.Variable):
        value = value.array
    value = to_host(value)
    if np.isscalar(value) or getattr(value, "ndim", -1) == 0:
        try:
            return float(value)
        except (TypeError, ValueError):
            return None
    return None
