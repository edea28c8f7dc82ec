"""An iterator that leaves padding out and counts the samples."""

from __future__ import annotations

import copy
from typing import Any

import chainer
import numpy as np

from chainermn_ng.datasets.scattered_dataset import padding_mask


class CountingIterator(chainer.dataset.Iterator):
    """Stands in for an iterator while an evaluator runs.

    Samples that :func:`~chainermn_ng.datasets.padding_mask` marks are dropped from
    the batches, and batches without any other are skipped. It knows the order of
    Chainer's own iterators, shuffled or not; of others it takes that they go through
    the data set from first to last. Over no samples it stops at once.

    Args:
        iterator: the real one, which does not repeat.

    Copies count together: an evaluator may run over a copy.
    """

    def __init__(self, iterator: chainer.dataset.Iterator) -> None:
        self._iterator = self._original = iterator
        self._count = [0]
        dataset = getattr(iterator, "dataset", None)
        self.is_empty = dataset is not None and len(dataset) == 0
        self._padding = None if dataset is None else padding_mask(dataset)
        self._position = 0
        self._order: np.ndarray | None = None
        self._note_order()

    @property
    def n_samples(self) -> int:
        """Samples given out since this object was made."""
        return self._count[0]

    @property
    def has_no_samples(self) -> bool:
        """Whether its data set is empty, or all of it is padding."""
        if self._padding is None:
            return self.is_empty
        return bool(np.all(self._padding))

    def _note_order(self) -> None:
        # Drawn anew when an epoch ends, so it has to be read before.
        state = getattr(self._iterator, "_state", None)
        self._position = getattr(state, "current_position", 0)
        order = getattr(state, "order", None)
        self._order = None if order is None else np.array(order)

    def __next__(self) -> list[Any]:
        if self.is_empty:
            raise StopIteration
        while True:
            batch = self._without_padding(next(self._iterator))
            if len(batch):
                self._count[0] += len(batch)
                return batch

    next = __next__

    def _without_padding(self, batch: Any) -> Any:
        if self._padding is None:
            return batch
        positions = np.arange(self._position, self._position + len(batch))
        self._position += len(batch)
        if self._order is not None:
            positions = self._order[positions]
        is_padding = self._padding[positions]
        if not is_padding.any():
            return batch
        return [x for x, drop in zip(batch, is_padding, strict=True) if not drop]

    def reset(self) -> None:
        """Begin at the first sample again; one that cannot is copied instead."""
        if hasattr(self._original, "reset"):
            self._original.reset()
        else:
            self._iterator = copy.copy(self._original)
        self._note_order()

    def __copy__(self) -> CountingIterator:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._iterator = twin._original = copy.copy(self._original)
        twin._note_order()
        return twin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)
