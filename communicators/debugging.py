"""Whether the ranks compare more than they need to: ``CHAINERMN_NG_DEBUG``.

In debug mode

* the collectives whose arrays may differ between ranks (``gather``, ``allgather``,
  ``alltoall``) compare number, dtypes and numbers of dimensions of the arrays, too;
* the ranks compare how many collectives each has called;
* errors of NCCL operations tell where in the program each was called.

All of that travels in the messages that the ranks exchange anyway. What else is
compared, :mod:`chainermn_ng` says. Other collectives compare shapes and dtypes always.
"""

from __future__ import annotations

import os

DEBUG_VARIABLE = "CHAINERMN_NG_DEBUG"

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def is_debug_asked_for() -> bool:
    """Tell what the environment says; read when a communicator is created.

    Raises:
        ValueError: the variable is neither on nor off.
    """
    value = os.environ.get(DEBUG_VARIABLE, "")
    word = value.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise ValueError(f"{DEBUG_VARIABLE}={value!r}: expected 1 (on) or 0 (off)")
