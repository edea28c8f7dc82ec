"""Random numbers: alike on all ranks for weights, apart for everything else.

    set_seed(42, comm)              # dropout, shuffling, augmentation: apart
    with shared_seed(42):           # initial weights: alike
        model = MLP()

Both repeat on the next run. Without ``shared_seed`` the weights become those of rank 0
at the first update anyway.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from chainermn_ng import devices
from chainermn_ng.communicators.factory import engine_of

_SHARED = 0
_PER_RANK = 1


def set_seed(seed: int, comm: Any = None) -> None:
    """Seed the generators of this rank, differently on each rank. Collective.

    Those are Python's ``random``, NumPy's global one, and CuPy's on the current
    device if there is one: choose the device before. Chainer draws dropout masks and
    the order of samples from the last two.

    Args:
        seed: from 0 to 2**32 - 1, the same on all ranks.
        comm: communicator of this package, of the engine, or of mpi4py; ``None`` in
            a program of one process, which draws what rank 0 would.

    Raises:
        MismatchError: the ranks gave different seeds.
        TypeError, ValueError: no such seed; on all ranks.
    """
    if comm is None:
        _seed_all(_derived(_checked(seed), _PER_RANK, 0))
        return
    with engine_of(comm) as engine:
        error = None
        try:
            _checked(seed)
        except (TypeError, ValueError) as failure:
            error = failure
        engine.agree("set_seed", f"seed={seed}", error=error)
        _seed_all(_derived(seed, _PER_RANK, engine.rank))


@contextlib.contextmanager
def shared_seed(seed: int) -> Iterator[None]:
    """Draw the same random numbers on all ranks inside of a ``with`` block.

    Not collective. Afterwards the generators go on where they were before.

    Args:
        seed: from 0 to 2**32 - 1, the same on all ranks; may be that of
            :func:`set_seed`, the numbers are others.

    Raises:
        TypeError, ValueError: no such seed.
    """
    words = _derived(_checked(seed), _SHARED, 0)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cupy_random = devices.cupy_random()
    if cupy_random is not None:
        # Seeding changes the generator in place; the block gets one of its own.
        cupy_state = cupy_random.get_random_state()
        cupy_random.set_random_state(cupy_random.RandomState(words[2]))
    _seed_host(words)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if cupy_random is not None:
            cupy_random.set_random_state(cupy_state)


def _derived(seed: int, purpose: int, rank: int) -> list[int]:
    """Return one 32-bit seed each for Python, NumPy and CuPy."""
    sequence = np.random.SeedSequence([seed, purpose, rank])
    return [int(word) for word in sequence.generate_state(3)]


def _checked(seed: Any) -> int:
    number = operator.index(seed)
    if not 0 <= number < 2**32:
        raise ValueError(f"seed {seed}: expected 0 to 2**32 - 1")
    return number


def _seed_host(words: list[int]) -> None:
    random.seed(words[0])
    np.random.seed(words[1])


def _seed_all(words: list[int]) -> None:
    _seed_host(words)
    cupy_random = devices.cupy_random()
    if cupy_random is not None:
        cupy_random.seed(words[2])
