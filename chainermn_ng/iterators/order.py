"""Orders of samples that can be drawn again: on other ranks, and after a resume."""

from __future__ import annotations

import hashlib
import json
import pickle
import threading
import warnings
from collections import deque
from typing import Any

import chainer
import numpy as np
from chainer.serializer import Deserializer

from chainermn_ng.seeds import shared_seed

# How a snapshot names the state of what draws the orders.
_KEY = "order_generator"


def permutation(seed: int, number: int, n_samples: int) -> np.ndarray:
    """Return the order ``number`` of those that belong to a seed: int64 indices."""
    words = np.random.SeedSequence([seed, number]).generate_state(4)
    return np.random.RandomState(words).permutation(n_samples)


def seed_from(random_state: np.random.RandomState, purpose: int) -> int:
    """Return a seed that follows from a generator's state, without drawing from it.

    So a script that has seeded NumPy gets the same orders in each run, and all that it
    draws itself is what it would have drawn anyway.

    Args:
        random_state: the generator.
        purpose: tells seeds apart that are made from the same state.

    Returns:
        int: 0 to 2**32 - 1.
    """
    state = pickle.dumps((random_state.get_state(), purpose), protocol=4)
    return int.from_bytes(hashlib.blake2b(state, digest_size=4).digest(), "little")


def global_generator() -> np.random.RandomState:
    """Return the generator of NumPy's functions and of Chainer's samplers."""
    return np.random.random.__self__  # type: ignore[attr-defined, no-any-return]


class SharedOrder:
    """Order sampler that gives the same orders on all ranks that hold the same seed.

    Args:
        seed: 0 to 2**32 - 1.
        sampler: an order sampler of Chainer's kind, equal on all ranks, for other
            orders than random ones. While it draws, Python's and NumPy's global
            generators hold seeds that are the same on all ranks; then they go on where
            they were.
    """

    def __init__(self, seed: int, sampler: Any = None) -> None:
        self._seed = seed
        self._sampler = sampler
        self._n_drawn = 0

    def __call__(self, current_order: np.ndarray, current_position: int) -> Any:
        self._n_drawn += 1
        if self._sampler is None:
            return permutation(self._seed, self._n_drawn, len(current_order))
        words = np.random.SeedSequence([self._seed, self._n_drawn]).generate_state(1)
        with shared_seed(int(words[0])):
            return self._sampler(current_order, current_position)

    def get_state(self) -> dict[str, Any]:
        """Return what decides on all orders to come."""
        inner = None if self._sampler is None else generator_states(self._sampler)
        return {"seed": self._seed, "n_drawn": self._n_drawn, "sampler": inner}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`get_state` was called."""
        self._seed, self._n_drawn = state["seed"], state["n_drawn"]
        if self._sampler is not None:
            set_generator_states(self._sampler, state["sampler"])


def generator_states(sampler: Any) -> dict[str, Any]:
    """Return the states of the generators that are attributes of a sampler.

    NumPy's global generator is not one's own, and left out.
    """
    if isinstance(sampler, SharedOrder):
        return sampler.get_state()
    states = {}
    for name, value in getattr(sampler, "__dict__", {}).items():
        if isinstance(value, np.random.RandomState):
            if value is not global_generator():
                states[name] = value.get_state(legacy=False)
        elif isinstance(value, np.random.Generator):
            states[name] = value.bit_generator.state
    return states


def set_generator_states(sampler: Any, states: dict[str, Any]) -> None:
    """Set what :func:`generator_states` returned."""
    if isinstance(sampler, SharedOrder):
        sampler.set_state(states)
        return
    for name, state in states.items():
        generator = getattr(sampler, name)
        if isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


class TrackedOrder:
    """Order sampler that knows the generators' state after each order.

    Iterators that load ahead draw the next order before the current one is used up. A
    snapshot must hold the state that belongs to the current one; and Chainer's throw
    away what they have loaded ahead when they are saved, and draw once more. So each
    order is drawn from the state that belongs to the one before it.

    Args:
        sampler: draws the orders.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._drawn: deque[tuple[Any, dict[str, Any]]] = deque()
        # The thread of an iterator that loads ahead draws as well.
        self._lock = threading.Lock()

    @classmethod
    def install(cls, iterator: Any, sampler: Any) -> TrackedOrder:
        """Make one the order sampler of an iterator of Chainer's."""
        tracked = cls(sampler)
        iterator.order_sampler = tracked
        # A MultiprocessIterator has handed its sampler on already.
        loop = getattr(iterator, "_prefetch_loop", None)
        if loop is not None:
            loop.order_sampler = tracked
        return tracked

    def __call__(self, current_order: np.ndarray, current_position: int) -> Any:
        with self._lock:
            for drawn, states in self._drawn:
                if drawn is current_order:
                    set_generator_states(self.sampler, states)
            order = self.sampler(current_order, current_position)
            self._drawn.append((order, generator_states(self.sampler)))
        return order

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def state_at(self, order: Any) -> dict[str, Any]:
        """Return the generators' state after ``order``; forget older ones."""
        with self._lock:
            if any(drawn is order for drawn, _ in self._drawn):
                while self._drawn[0][0] is not order:
                    self._drawn.popleft()
                return self._drawn[0][1]
            return generator_states(self.sampler)

    def serialize(self, serializer: chainer.AbstractSerializer, iterator: Any) -> None:
        """Save or load an iterator together with the state of its order's generators.

        A snapshot without that state is loaded with a warning.

        Args:
            serializer: Chainer's.
            iterator: the one that draws its orders here.
        """
        if not isinstance(serializer, Deserializer):
            iterator.serialize(serializer)
            text = json.dumps(self.state_at(iterator._state.order), default=_as_list)
            serializer(_KEY, np.frombuffer(text.encode(), np.uint8))
            return
        try:
            data = serializer(_KEY, None)
        except KeyError:
            data = None
        if data is None:
            warnings.warn(
                "the snapshot does not hold the state of the generator of the order: "
                "this epoch goes on as it was, later ones have another order",
                stacklevel=3,
            )
            iterator.serialize(serializer)
            return
        states = json.loads(np.asarray(data, np.uint8).tobytes())
        # Before the iterator begins to load ahead.
        with self._lock:
            set_generator_states(self.sampler, states)
        iterator.serialize(serializer)
        order = iterator._state.order
        with self._lock:
            # Some iterators load into the array that is there.
            later = [item for item in self._drawn if item[0] is not order]
            self._drawn = deque([(order, states), *later])


def _as_list(value: Any) -> Any:
    return value.tolist()
