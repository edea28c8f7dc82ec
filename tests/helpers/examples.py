"""Property-based tests on several ranks: the same examples on all of them.

All ranks run as many examples, and take those that rank 0 drew: nothing that depends
on time (limits, health checks, shrinking) may stop one rank before another. A test
compares by ``assert_all_ranks``, so that an example that fails does so on every rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st


def in_step(n_examples: int) -> settings:
    """Return the settings of a test that all ranks run together."""
    return settings(
        max_examples=n_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def of_rank_0(comm: Any, *drawn: Any) -> Any:
    """Return what rank 0 drew. Collective.

    The ranks' generators have the same seed, but what Hypothesis draws depends on the
    modules that a process has imported, too.
    """
    return comm.bcast_obj(drawn)


def shapes(max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes of few dimensions, some of which may be 0."""
    return st.lists(st.integers(0, 4), max_size=max_dims).map(tuple)


def layouts() -> st.SearchStrategy[str]:
    """Draw a memory layout for :func:`laid_out`."""
    return st.sampled_from(["c", "fortran", "reversed", "strided", "broadcast"])


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """Return an array of equal values in another memory layout.

    ``broadcast`` repeats the first row by a stride of 0, so its values are others.
    """
    if array.ndim == 0 or layout == "c":
        return array
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1]
    if layout == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    return np.broadcast_to(array[:1], array.shape) if array.shape[0] else array


def values(seed: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return small whole numbers, which any dtype holds and adds exactly."""
    random = np.random.RandomState(seed)
    return random.randint(0, 4, shape).astype(dtype).reshape(shape)
