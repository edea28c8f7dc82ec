"""The same order of samples on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import chainer
from chainer.iterators import ShuffleOrderSampler

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.iterators.order import SharedOrder, TrackedOrder, seed_from


def create_synchronized_iterator(
    actual_iterator: Any, communicator: Any
) -> SynchronizedIterator:
    """Make an iterator go through its data in the same order on all ranks. Collective.

    For models whose parts are on several ranks, when each rank has its own data (the
    source sentences on one, the target sentences on the other) or can read all of it:
    nothing is sent after the creation. All ranks must draw equally many batches.

    The order of rank 0 counts. A random one, the default of Chainer's iterators, comes
    from a generator of the iterator's own, seeded by the state of the generator that it
    would have drawn from; nothing is drawn from that one. Another ``order_sampler`` is
    sent from rank 0 to all ranks once; while it draws, the global generators of Python
    and NumPy hold shared seeds for a moment, and go on where they were. Without
    shuffling the order stays that of the data.

    The iterator begins anew. A snapshot holds its order, and the state of what draws
    the next ones.

    Args:
        actual_iterator: an iterator of Chainer's; its ``order_sampler`` is replaced.
        communicator: communicator of this package, of the engine, or of mpi4py.

    Returns:
        SynchronizedIterator: stands in for ``actual_iterator``.

    Raises:
        ValueError: the iterator has no ``order_sampler``; on all ranks.
        TypeError: rank 0's ``order_sampler`` cannot be pickled; on all ranks.
        MismatchError: data sets of different lengths, other batch sizes, or only some
            iterators shuffle; on all ranks.
    """
    number = 0
    if isinstance(communicator, ChainerCommunicator):
        number = communicator.new_iterator_number()
    with engine_of(communicator) as engine:
        label = f"synchronized iterator {number}"
        error, details = None, ""
        try:
            details = _describe(actual_iterator)
        except Exception as failure:
            error = failure
        engine.agree(label, details, error)
        if actual_iterator.order_sampler is None:
            return SynchronizedIterator(actual_iterator, None)
        shared = None
        if engine.rank == 0:
            shared = _shared_order(actual_iterator.order_sampler, number)
        shared = engine.bcast_obj(shared, root=0)
        order = TrackedOrder.install(actual_iterator, shared)
        try:
            actual_iterator.reset()
        except Exception as failure:
            error = failure
        engine.agree(f"{label}, first order", error=error)
    return SynchronizedIterator(actual_iterator, order)


def _describe(iterator: Any) -> str:
    if not hasattr(iterator, "order_sampler"):
        raise ValueError(
            "create_synchronized_iterator: expected an iterator with an order_sampler; "
            f"got {type(iterator).__qualname__}"
        )
    n_samples = len(iterator.dataset)
    how = "in order" if iterator.order_sampler is None else "shuffled"
    return f"{n_samples} samples, batches of {iterator.batch_size}, {how}"


def _shared_order(sampler: Any, number: int) -> SharedOrder:
    if isinstance(sampler, TrackedOrder):
        sampler = sampler.sampler
    if isinstance(sampler, SharedOrder):
        return copy.copy(sampler)
    if type(sampler) is ShuffleOrderSampler:
        return SharedOrder(seed_from(sampler._random, number))
    return SharedOrder(number, sampler)


class SynchronizedIterator(chainer.dataset.Iterator):
    """Made by :func:`create_synchronized_iterator`.

    Attributes that are not its own are read from and set on the actual iterator.

    Attributes:
        actual_iterator: that draws the batches.
    """

    actual_iterator: Any = None
    _order: TrackedOrder | None = None

    def __init__(self, actual_iterator: Any, order: TrackedOrder | None) -> None:
        object.__setattr__(self, "actual_iterator", actual_iterator)
        object.__setattr__(self, "_order", order)

    def __next__(self) -> Any:
        batch = next(self.actual_iterator)
        if self._order is not None:
            # Forgets the orders of epochs that are over.
            self._order.state_at(self.actual_iterator._state.order)
        return batch

    next = __next__

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the iterator and the state of its order's generator."""
        if self._order is None:
            self.actual_iterator.serialize(serializer)
        else:
            self._order.serialize(serializer, self.actual_iterator)

    def finalize(self) -> None:
        """Release what the iterator holds."""
        if self.actual_iterator is not None:
            self.actual_iterator.finalize()

    def __copy__(self) -> SynchronizedIterator:
        actual = copy.copy(self.actual_iterator)
        if self._order is None:
            return SynchronizedIterator(actual, None)
        sampler = copy.deepcopy(self._order.sampler)
        return SynchronizedIterator(actual, TrackedOrder.install(actual, sampler))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.actual_iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.actual_iterator, name, value)
