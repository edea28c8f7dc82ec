"""Batches with which a rank takes part in a step without being counted."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import chainer

_NAME = "chainermn_ng_uncounted"


def uncounted_batch(is_uncounted: bool = True) -> AbstractContextManager[Any]:
    """Say to the links that what they are given within does not count.

    For this thread. Links whose forward pass meets other ranks then join it with
    nothing of their own.
    """
    return chainer.using_config(_NAME, is_uncounted)


def is_uncounted() -> bool:
    """Tell whether the batch that is computed on does not count."""
    return bool(getattr(chainer.config, _NAME, False))
