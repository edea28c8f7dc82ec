"""Averaging the persistent values of a model over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainer import backend
from chainer.training import extension

import communicators
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.communicators.parameters import named_persistents

# A link, the name of its persistent value, and that value.
_Place = tuple[chainer.Link, str, Any]


class AllreducePersistent(extension.Extension):
    """Trainer extension that averages a model's persistent values over the ranks.

    Persistent values are what links save beside parameters: running statistics of a
    :class:`chainer.links.BatchNormalization`, of which every rank has its own. With
    the average in their place, evaluations and snapshots no longer depend on the
    rank. Once an epoch, before evaluators, is enough. Attach it on all ranks.

    Averaged are floating and complex numbers: arrays of any layout and shape, in
    place and in their own dtype (half precision is summed in float32), and also
    NumPy's and Python's own numbers. Everything else stays as it is: integers (they
    count something), truth values, texts, ``None``.

    Args:
        model: whose persistent values are averaged.
        comm: communicator of this package, of the engine, or of mpi4py.
    """

    trigger = 1, "epoch"
    #: Above that of Chainer's evaluator.
    priority = extension.PRIORITY_WRITER + 1
    is_collective = True

    def __init__(self, model: chainer.Link, comm: Any) -> None:
        self.model = model
        self.comm = comm

    def __call__(self, trainer: Any = None) -> None:
        """Average now. Collective; ``trainer`` is not used.

        Raises:
            MismatchError: the values differ between ranks in path, shape or dtype; on
                all of them, and nothing has been changed.
            ValueError: an array is read-only on some rank; on all of them.
        """
        places: dict[str, _Place] = {}
        seen: set[int] = set()
        for name, link, attribute in named_persistents(self.model):
            value = vars(link)[attribute]
            # Links may share an array, which is averaged once.
            if _is_averaged(value) and (np.isscalar(value) or id(value) not in seen):
                seen.add(id(value))
                places[name] = link, attribute, value
        label = f"AllreducePersistent({type(self.model).__name__})"
        details = [(name, _describe(value)) for name, (_, _, value) in places.items()]
        with engine_of(self.comm) as engine:
            engine.agree(label, details, error=_error_of(places))
            # NumPy's and CuPy's do not travel together.
            for module in sorted({_module_name(place[2]) for place in places.values()}):
                chosen = [p for p in places.values() if _module_name(p[2]) == module]
                _average(engine, chosen)


def _average(engine: communicators.CommunicatorBase, places: Sequence[_Place]) -> None:
    arrays = tuple(np.asarray(v) if np.isscalar(v) else v for _, _, v in places)
    means = engine.allreduce(arrays, "mean")
    for (link, attribute, value), mean in zip(places, means, strict=True):
        if np.isscalar(value):
            vars(link)[attribute] = type(value)(mean[()])
        else:
            value[...] = mean


def _module_name(value: Any) -> str:
    return backend.get_array_module(value).__name__


def _is_averaged(value: Any) -> bool:
    if isinstance(value, float | complex | np.inexact):
        return True
    return isinstance(value, chainer.get_array_types()) and value.dtype.kind in "fc"


def _describe(value: Any) -> str:
    if np.isscalar(value):
        return type(value).__name__
    return f"{_module_name(value)} array, {value.dtype} {value.shape}"


def _error_of(places: dict[str, _Place]) -> ValueError | None:
    for name, (_, _, value) in places.items():
        flags = getattr(value, "flags", None)
        if not np.isscalar(value) and not getattr(flags, "writeable", True):
            return ValueError(f"persistent value {name} is read-only")
    return None
