"""Which samples of a batch only make the shards equally long."""

from __future__ import annotations

from typing import Any

import numpy as np

from chainermn_ng.datasets.scattered_dataset import padding_mask


class PaddingOfBatches:
    """Tells which samples of each batch of an iterator are padding.

    It knows the order of Chainer's own iterators, shuffled or not; of others it takes
    that they go through the data set from first to last.

    Args:
        iterator: over a data set that :func:`~chainermn_ng.datasets.padding_mask`
            may know. :meth:`note_order` must be called whenever it is reset.
    """

    def __init__(self, iterator: Any) -> None:
        dataset = getattr(iterator, "dataset", None)
        self._mask = None if dataset is None else padding_mask(dataset)
        self._iterator = iterator
        self.note_order()

    @property
    def is_everything(self) -> bool:
        """Whether the data set has samples, and all of them are padding."""
        return self._mask is not None and bool(self._mask.all())

    def note_order(self) -> None:
        """Look where the iterator stands; an epoch's end draws the order anew."""
        state = getattr(self._iterator, "_state", None)
        self._position = getattr(state, "current_position", 0)
        order = getattr(state, "order", None)
        self._order = None if order is None else np.array(order)

    def of_next(self, n_samples: int) -> np.ndarray | None:
        """Return which of the next ``n_samples`` are padding; ``None``: none is.

        Called once after each batch of an iterator that does not repeat.
        """
        if self._mask is None:
            return None
        positions = np.arange(self._position, self._position + n_samples)
        self._position += n_samples
        if self._order is not None:
            positions = self._order[positions]
        is_padding = self._mask[positions]
        return is_padding if is_padding.any() else None
