"""An iterator that leaves padding out and counts the samples."""

from __future__ import annotations

import copy
from typing import Any

import chainer

from chainermn_ng.iterators.padding import PaddingOfBatches


class CountingIterator(chainer.dataset.Iterator):
    """Stands in for an iterator while an evaluator runs.

    Samples that :func:`~chainermn_ng.datasets.padding_mask` marks are dropped from
    the batches, and batches without any other are skipped. An iterator may say itself
    which samples of its last batch are padding, by an attribute ``batch_padding``
    (bool, one per sample, or ``None``). Over no samples it stops at once.

    Args:
        iterator: the real one, which does not repeat.

    Copies count together: an evaluator may run over a copy.
    """

    def __init__(self, iterator: chainer.dataset.Iterator) -> None:
        self._iterator = self._original = iterator
        self._count = [0]
        dataset = getattr(iterator, "dataset", None)
        self.is_empty = dataset is not None and len(dataset) == 0
        self._says_padding = hasattr(iterator, "batch_padding")
        self._note_order()

    @property
    def n_samples(self) -> int:
        """Samples given out since this object was made."""
        return self._count[0]

    @property
    def has_no_samples(self) -> bool:
        """Whether its data set is empty, or all of it is padding."""
        if self._says_padding:
            return self.is_empty
        return self.is_empty or self._padding.is_everything

    def _note_order(self) -> None:
        # Drawn anew when an epoch ends, so it has to be read before.
        self._padding = PaddingOfBatches(self._iterator)

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
        if self._says_padding:
            is_padding = self._iterator.batch_padding
        else:
            is_padding = self._padding.of_next(len(batch))
        if is_padding is None:
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
