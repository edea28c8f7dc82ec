"""Which rank gets which samples of a data set, and in what form."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from chainermn_ng.datasets.cutting import cut, is_in_memory
from communicators.object_collectives import pickled

_LARGE_BYTES = 64 * 1024 * 1024


def exact_part(n_samples: int, size: int, rank: int) -> tuple[int, int]:
    """Return begin and end of a part; the first ones are longer by one if need be."""
    least, n_longer = divmod(n_samples, size)
    begin = rank * least + min(rank, n_longer)
    return begin, begin + least + (rank < n_longer)


class ScatterPlan:
    """At the root: which rank gets which samples, and in what form."""

    def __init__(
        self,
        dataset: Any,
        size: int,
        shuffle: bool,
        seed: int | None,
        equal_length: bool,
    ) -> None:
        if dataset is None or not hasattr(dataset, "__len__"):
            raise TypeError(
                "scatter_dataset: expected a data set with a length at the root; got "
                f"{type(dataset).__qualname__}"
            )
        if isinstance(dataset, dict | set | frozenset):
            raise TypeError(
                f"scatter_dataset: a {type(dataset).__qualname__} has no samples 0, 1, "
                "...; make a list of it"
            )
        self.dataset = dataset
        self.size = size
        self.n_samples = len(dataset)
        self.equal_length = equal_length
        self.order = np.arange(self.n_samples)
        if shuffle:
            self.order = np.random.RandomState(seed).permutation(self.n_samples)
        self._whole: np.ndarray | None = None
        self.cuts = False

    def decide(self, in_memory: bool | None) -> None:
        """Choose between cutting shards and sending the data set whole."""
        self.cuts = is_in_memory(self.dataset) if in_memory is None else in_memory
        if self.size == 1:
            self.cuts = False
        elif not self.cuts:
            self._whole = _pickled(self.dataset)
            if in_memory is None and self._whole.size > _LARGE_BYTES:
                warnings.warn(
                    f"scatter_dataset sends the whole {type(self.dataset).__name__} "
                    f"({self._whole.size / 1e6:.0f} MB) to each of {self.size} ranks; "
                    "if it holds its samples in memory, in_memory=True sends shards "
                    "only (in_memory=False silences this)",
                    stacklevel=3,
                )

    def shard(self, rank: int) -> tuple[Any, np.ndarray, np.ndarray, int]:
        """Return base (``None``: the whole data set), positions, indices, padding."""
        begin, end = exact_part(self.n_samples, self.size, rank)
        chosen = list(range(begin, end))
        n_padding = 0
        if self.equal_length:
            n_padding = -(-self.n_samples // self.size) - len(chosen)
            repeated = begin if chosen else rank % max(self.n_samples, 1)
            chosen += [repeated] * n_padding
        indices = self.order[chosen] if chosen else np.empty(0, np.int64)
        indices = indices.astype(np.int64)
        if not self.cuts:
            return None, indices, indices, n_padding
        n_own = max(len(chosen) - n_padding, min(n_padding, 1))
        positions = np.arange(len(chosen)) % max(n_own, 1)
        base = cut(self.dataset, indices[:n_own].tolist())
        return base, positions, indices, n_padding

    def parcels(self, rank: int) -> list[np.ndarray]:
        """Return what travels to ``rank``, as bytes."""
        parcels = [_pickled(self.shard(rank))]
        return parcels if self._whole is None else [self._whole, *parcels]


def _pickled(obj: Any) -> np.ndarray:
    try:
        return pickled(obj, "scatter_dataset")
    except TypeError as error:
        raise TypeError(
            f"{error}. Make it picklable (functions at module level, no open files), "
            "or make the data set on every rank and share out indices with "
            "scatter_index"
        ) from error
