"""What a rank shows of an iterator that is on another rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


class RemoteDataset:
    """Stands in for a data set that is on another rank: it has its length only."""

    def __init__(self, length: int, rank: int) -> None:
        self._length = length
        self._rank = rank

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"the samples are on rank {self._rank}; here they come in batches only"
        )


@dataclass
class IteratorState:
    """State of a Chainer iterator after a batch; unknown numbers are ``None``.

    Attributes:
        batch_padding: which samples of the last batch are padding; ``None``: none is.
    """

    current_position: int = 0
    epoch: int = 0
    is_new_epoch: bool = False
    epoch_detail: float = 0.0
    previous_epoch_detail: float | None = None
    epoch_size: int | None = None
    batch_size: int | None = None
    repeat: bool | None = None
    batch_padding: np.ndarray | None = None

    @classmethod
    def of(cls, iterator: Any) -> IteratorState:
        """Return the state of an iterator of Chainer's, or of one's own."""
        epoch_size = getattr(iterator, "_epoch_size", None)
        if epoch_size is None and hasattr(iterator, "dataset"):
            epoch_size = len(iterator.dataset)
        return cls(
            current_position=getattr(iterator, "current_position", 0),
            epoch=iterator.epoch,
            is_new_epoch=bool(iterator.is_new_epoch),
            # An iterator over nothing divides by zero.
            epoch_detail=iterator.epoch if epoch_size == 0 else iterator.epoch_detail,
            previous_epoch_detail=getattr(iterator, "previous_epoch_detail", None),
            epoch_size=epoch_size,
            batch_size=getattr(iterator, "batch_size", None),
            repeat=getattr(iterator, "repeat", None),
        )
