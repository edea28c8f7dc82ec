"""One rank's batches on all ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import chainer
import numpy as np
from chainer.serializer import Deserializer

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.factory import lasting_engine_of
from chainermn_ng.iterators.mirrored_state import IteratorState, RemoteDataset
from chainermn_ng.iterators.order import TrackedOrder, generator_states
from chainermn_ng.iterators.padding import PaddingOfBatches
from chainermn_ng.packing import Packed, unpack
from communicators.arguments import check_root

_ITERATOR = ("epoch", "is_new_epoch", "__next__")


def create_multi_node_iterator(
    actual_iterator: Any, communicator: Any, rank_master: int = 0
) -> MultiNodeIterator:
    """Give all ranks the batches of one rank's iterator. Collective.

    For models whose parts are on several ranks, when all parts (or the first and the
    last) need the same batch. ``next`` of the result is collective: every rank gets
    the master's batch, equal in values, dtypes and order, or all get its
    ``StopIteration``, or its error. Batches may be anything that can be pickled; the
    arrays in them are not pickled but sent as they are.

    Every rank has the whole interface of an iterator, and attributes show where the
    master's iterator is. Only ``dataset`` has no more than a length on the others.
    :meth:`reset`, :meth:`serialize` and :meth:`finalize` send nothing, so they need
    not be called by all ranks at once; the next batch brings the master's state.

    Args:
        actual_iterator: at the master any iterator of Chainer, or one of one's own
            with its attributes; ignored elsewhere.
        communicator: communicator of this package, or of the engine.
        rank_master: the rank whose iterator counts.

    Returns:
        MultiNodeIterator: the iterator to use on this rank.

    Raises:
        TypeError: the master's object is no iterator; on all ranks.
        ValueError: no such rank; on all ranks.
        MismatchError: the ranks gave different masters.
    """
    return MultiNodeIterator(actual_iterator, communicator, rank_master)


class MultiNodeIterator(chainer.dataset.Iterator):
    """Made by :func:`create_multi_node_iterator`.

    Attributes:
        actual_iterator: the iterator itself at the master, else ``None``.
        communicator: whose ranks take part.
        rank_master (int): the rank of the iterator.
        dataset: at the master the data set, elsewhere an object with its length.
        batch_padding (numpy.ndarray): bool, which samples of the last batch are
            padding of a scattered data set; ``None``: none is. Evaluators look at it.
    """

    actual_iterator: Any = None
    _order: TrackedOrder | None = None

    def __init__(
        self, actual_iterator: Any, communicator: Any, rank_master: int = 0
    ) -> None:
        self.communicator = communicator
        self.rank_master = rank_master
        self._engine = lasting_engine_of(communicator)
        number = ""
        if isinstance(communicator, ChainerCommunicator):
            number = f" {communicator.new_iterator_number()}"
        self._label = f"multi-node iterator{number}"
        self._is_master = self._engine.rank == rank_master
        start, error = None, None
        try:
            check_root(rank_master, self._engine.size, "create_multi_node_iterator")
            if self._is_master:
                start = self._begin(actual_iterator)
        except Exception as failure:
            error = failure
        self._agree("create", f"rank_master={rank_master}", error)
        n_samples, self._state_shown = self._engine.bcast_obj(start, root=rank_master)
        self._dataset = getattr(self.actual_iterator, "dataset", None)
        if not self._is_master and n_samples is not None:
            self._dataset = RemoteDataset(n_samples, rank_master)

    def _begin(self, iterator: Any) -> tuple[int | None, IteratorState]:
        missing = [name for name in _ITERATOR if not hasattr(iterator, name)]
        if missing:
            raise TypeError(
                "create_multi_node_iterator: expected an iterator of Chainer at the "
                f"master; got {type(iterator).__qualname__}, without {missing}"
            )
        self.actual_iterator = iterator
        self._padding = self._padding_of_batches()
        sampler = getattr(iterator, "order_sampler", None)
        # One that draws from NumPy's generator has none of its own to be saved.
        if generator_states(sampler):
            self._order = TrackedOrder.install(iterator, sampler)
        dataset = getattr(iterator, "dataset", None)
        n_samples = None if dataset is None else len(dataset)
        return n_samples, IteratorState.of(iterator)

    def _padding_of_batches(self) -> PaddingOfBatches | None:
        # In a training set a padding sample is a sample like others.
        if getattr(self.actual_iterator, "repeat", True):
            return None
        return PaddingOfBatches(self.actual_iterator)

    # -- batches ---------------------------------------------------------------------

    def __next__(self) -> Any:
        batch, parcel, error = None, None, None
        if self._is_master:
            try:
                batch, state = self._draw()
                packed = Packed((batch, state), f"the batch of {self._label}")
                parcel = self._parcel(packed)
            except Exception as failure:
                error = failure
        self._agree("next", "", error)
        received = self._engine.bcast(parcel, root=self.rank_master)
        if not self._is_master:
            try:
                batch, state = _opened(*received)
            except Exception as failure:
                error = TypeError(
                    f"rank {self._engine.rank} cannot unpickle the batch "
                    f"({type(failure).__name__}: {failure})"
                )
        self._agree("the batch", "", error)
        self._state_shown = state
        if batch is None:
            raise StopIteration
        return batch[0]

    next = __next__

    def _draw(self) -> tuple[tuple[Any] | None, IteratorState]:
        """Return the next batch in a tuple, ``None`` at the end, and the state."""
        iterator = self.actual_iterator
        batch = None
        # Chainer's iterators divide by the number of samples.
        if len(getattr(iterator, "dataset", "?")) or getattr(iterator, "repeat", True):
            with contextlib.suppress(StopIteration):
                batch = (next(iterator),)
        state = IteratorState.of(iterator)
        if self._order is not None:
            # Forgets the orders of epochs that are over.
            self._order.state_at(iterator._state.order)
        if batch is not None and self._padding is not None:
            state.batch_padding = self._padding.of_next(len(batch[0]))
        return batch, state

    @staticmethod
    def _parcel(packed: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        memory = np.empty(packed.nbytes, np.uint8)
        packed.write_arrays(memory)
        return packed.head, np.array(packed.sizes, np.int64), memory

    def _agree(self, what: str, details: str, error: Exception | None) -> None:
        try:
            self._engine.agree(f"{self._label}, {what}", details, error)
        except Exception:
            if error is not None:
                raise error from None
            raise

    # -- state -----------------------------------------------------------------------

    @property
    def current_position(self) -> int:
        """Number of samples of this epoch that have been given out."""
        return self._shown().current_position

    @property
    def epoch(self) -> int:
        """Number of completed sweeps over the data set."""
        return self._shown().epoch

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last batch ended an epoch."""
        return self._shown().is_new_epoch

    @property
    def epoch_detail(self) -> float:
        """Epochs, with the part of the current one."""
        return self._shown().epoch_detail

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last batch; ``None`` before the first."""
        return self._shown().previous_epoch_detail

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch."""
        return self._shown().batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        # On the others the next batch brings it.
        self._state_shown.batch_size = value
        if self._is_master:
            self.actual_iterator.batch_size = value

    @property
    def repeat(self) -> bool | None:
        """Whether it begins again at the end of the data set."""
        return self._shown().repeat

    @property
    def dataset(self) -> Any:
        """The data set; away from the master only its length."""
        return self._dataset

    @property
    def dataset_size(self) -> int:
        """Number of samples in the data set."""
        return len(self._dataset)

    @property
    def batch_padding(self) -> np.ndarray | None:
        """See the class."""
        return self._state_shown.batch_padding

    @property
    def _epoch_size(self) -> int | None:
        return self._shown().epoch_size

    def _shown(self) -> IteratorState:
        # The script may change the master's iterator, by a reset for example.
        if self._is_master:
            return IteratorState.of(self.actual_iterator)
        return self._state_shown

    def reset(self) -> None:
        """Begin at the first sample again. Call it on all ranks."""
        old = self._state_shown
        if self._is_master:
            self.actual_iterator.reset()
            self._padding = self._padding_of_batches()
        self._state_shown = IteratorState(
            epoch_size=old.epoch_size, batch_size=old.batch_size, repeat=old.repeat
        )

    def finalize(self) -> None:
        """Release what the master's iterator holds."""
        if self.actual_iterator is not None:
            self.actual_iterator.finalize()

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the state: the iterator's at the master, elsewhere a mirror.

        With the iterator's goes the state of a generator that its ``order_sampler``
        has of its own. NumPy's global one is for the snapshot's maker to save.
        Each rank loads what it has saved, or what the master has; a rank that loads
        nothing gets the master's state with the next batch.
        """
        if self._is_master:
            if self._order is None:
                self.actual_iterator.serialize(serializer)
            else:
                self._order.serialize(serializer, self.actual_iterator)
            if isinstance(serializer, Deserializer):
                self._padding = self._padding_of_batches()
                self._state_shown = IteratorState.of(self.actual_iterator)
            return
        state = self._state_shown
        state.current_position = int(
            serializer("current_position", state.current_position)
        )
        state.epoch = int(serializer("epoch", state.epoch))
        state.is_new_epoch = bool(serializer("is_new_epoch", state.is_new_epoch))
        # As Chainer's iterators do: not all serializers take None.
        previous = state.previous_epoch_detail
        previous = serializer(
            "previous_epoch_detail", -1.0 if previous is None else previous
        )
        state.previous_epoch_detail = None if previous < 0 else float(previous)
        if state.epoch_size:
            state.epoch_detail = state.epoch + state.current_position / state.epoch_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.actual_iterator is None:
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; what is special to "
                "the actual iterator is on the master's rank only"
            )
        return getattr(self.actual_iterator, name)


def _opened(head: np.ndarray, sizes: np.ndarray, memory: np.ndarray) -> Any:
    return unpack(head, sizes.tolist(), memory, read_only=False)
