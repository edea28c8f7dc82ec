"""Snapshots of Chainer's own kind, in memory."""

from __future__ import annotations

import io
from typing import Any

import chainer


def saved(obj: Any) -> bytes:
    """Return what ``save_npz`` writes of an object."""
    file = io.BytesIO()
    chainer.serializers.save_npz(file, obj)
    return file.getvalue()


def load(snapshot: bytes, obj: Any, **options: Any) -> None:
    """Load what :func:`saved` returned into an object."""
    chainer.serializers.load_npz(io.BytesIO(snapshot), obj, **options)
