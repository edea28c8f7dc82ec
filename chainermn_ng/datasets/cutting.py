"""Cutting the samples of one rank out of a data set that is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainer import datasets


def is_in_memory(dataset: Any) -> bool:
    """Tell whether the samples of a data set lie in memory, ready to be cut out.

    They do in lists and tuples, NumPy and CuPy arrays, and in Chainer's
    ``TupleDataset``, ``DictDataset``, ``ConcatenatedDataset``, ``SubDataset`` and
    ``TransformDataset`` of such. All other classes may read or make a sample when it
    is asked for, anew each time, so theirs are never cut unasked.
    """
    if isinstance(dataset, chainer.get_array_types()):
        return dataset.ndim > 0
    kind = type(dataset)
    if isinstance(dataset, list | tuple):
        builtin = list if isinstance(dataset, list) else tuple
        return kind.__getitem__ is builtin.__getitem__
    if kind in (
        datasets.TupleDataset,
        datasets.DictDataset,
        datasets.ConcatenatedDataset,
    ):
        return all(is_in_memory(part) for part in _parts(dataset))
    if kind in (datasets.SubDataset, datasets.TransformDataset):
        return is_in_memory(dataset._dataset)
    return False


def cut(dataset: Any, indices: Sequence[int]) -> Any:
    """Return a data set of the samples at ``indices`` alone, in that order.

    Args:
        dataset: any data set. Of those that are in memory the kind is kept, so that
            transforms still run when a sample is asked for; of others each sample is
            read once, into a list.
        indices: ascending or not; may repeat.
    """
    if not is_in_memory(dataset):
        return [dataset[int(i)] for i in indices]
    if isinstance(dataset, chainer.get_array_types()):
        return dataset[np.asarray(indices, np.intp)]
    if isinstance(dataset, list | tuple):
        return [dataset[i] for i in indices]
    kind = type(dataset)
    if kind is datasets.TupleDataset:
        return kind(*(cut(part, indices) for part in _parts(dataset)))
    if kind is datasets.DictDataset:
        return kind(**{k: cut(v, indices) for k, v in dataset._datasets.items()})
    if kind is datasets.TransformDataset:
        return kind(cut(dataset._dataset, indices), dataset._transform)
    if kind is datasets.SubDataset:
        positions = dataset._start + np.asarray(indices, np.intp)
        if dataset._order is not None:
            positions = np.asarray(dataset._order, np.intp)[positions]
        return cut(dataset._dataset, positions.tolist())
    return [dataset[i] for i in indices]


def _parts(dataset: Any) -> list[Any]:
    parts = dataset._datasets
    return list(parts.values() if isinstance(parts, dict) else parts)
