"""One rank's shard of a data set."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer import datasets


class ScatteredDataset(chainer.dataset.DatasetMixin):
    """The samples that one rank got from :func:`~chainermn_ng.scatter_dataset`.

    Args:
        base: what holds the samples.
        positions: where in ``base`` each sample is.
        indices: where in the whole data set each sample was.
        n_padding: see below.

    Attributes:
        indices (numpy.ndarray): int64, one per sample: its index in the whole data
            set.
        n_padding (int): how many samples at the end are repeats that only make the
            shards equally long. Without them the shards of all ranks together are
            exactly the data set.
    """

    def __init__(
        self,
        base: Any,
        positions: np.ndarray,
        indices: np.ndarray,
        n_padding: int = 0,
    ) -> None:
        self._base = base
        self._positions = positions
        self.indices = indices
        self.n_padding = n_padding

    def __len__(self) -> int:
        return len(self._positions)

    def get_example(self, i: int) -> Any:
        """Return sample ``i``; negative numbers count from the end."""
        return self._base[int(self._positions[i])]


def padding_mask(dataset: Any) -> np.ndarray | None:
    """Tell which samples of a data set are padding.

    Looks through Chainer's data sets that select or transform samples of others:
    ``TransformDataset``, ``SubDataset``, ``ConcatenatedDataset``, ``TupleDataset`` and
    ``DictDataset``. One's own may have an attribute ``n_padding``: the number of
    padding samples at its end.

    Returns:
        numpy.ndarray: bool, one per sample, or ``None`` if there is no padding.
    """
    mask = _mask(dataset)
    return mask if mask is not None and mask.any() else None


def _mask(dataset: Any) -> np.ndarray | None:
    if hasattr(dataset, "n_padding"):
        mask = np.zeros(len(dataset), bool)
        mask[len(dataset) - dataset.n_padding :] = True
        return mask
    if isinstance(dataset, datasets.TransformDataset):
        return _mask(dataset._dataset)
    if isinstance(dataset, datasets.SubDataset):
        mask = _mask(dataset._dataset)
        if mask is not None and dataset._order is not None:
            mask = mask[np.asarray(dataset._order, np.intp)]
        return None if mask is None else mask[dataset._start : dataset._finish]
    if isinstance(dataset, datasets.ConcatenatedDataset):
        masks = [_mask(part) for part in dataset._datasets]
        if all(mask is None for mask in masks):
            return None
        return np.concatenate(
            [
                np.zeros(len(part), bool) if mask is None else mask
                for part, mask in zip(dataset._datasets, masks, strict=True)
            ]
        )
    if isinstance(dataset, datasets.TupleDataset | datasets.DictDataset):
        parts = dataset._datasets
        masks = [
            _mask(p) for p in (parts.values() if isinstance(parts, dict) else parts)
        ]
        known = [mask for mask in masks if mask is not None]
        return np.logical_or.reduce(known) if known else None
    return None
