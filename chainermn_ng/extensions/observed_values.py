"""Observations as plain numbers that hold nothing of the user's alive."""

from __future__ import annotations

import math
from typing import Any

import chainer
import numpy as np

from chainermn_ng.communicators.parameters import to_host


def detached(value: Any) -> Any:
    """Return an observation as a plain value; what was observed stays as it is.

    Args:
        value: number, array or variable, on any device.

    Returns:
        A Python float for what :func:`as_float` takes; a NumPy array of its own for
        other arrays; anything else as it is, Python's complex numbers too.
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
    """Return a real number, or the only element of an array without dimensions.

    Returns:
        Infinity, with its sign, for a number that a float cannot hold, as NumPy does;
        ``None`` for everything else, complex numbers and texts included.
    """
    if isinstance(value, chainer.Variable):
        value = value.array
    value = to_host(value)
    if not (np.isscalar(value) or getattr(value, "ndim", -1) == 0):
        return None
    # NumPy takes texts for numbers, and leaves out imaginary parts.
    if np.asarray(value).dtype.kind in "cSU":
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None
