"""A data set for the ranks of a model that take no input."""

from __future__ import annotations

from collections.abc import Sized


def create_empty_dataset(dataset: Sized) -> list[tuple[()]]:
    """Return a data set of the same length whose samples are empty tuples.

    For a rank whose part of a model begins with a receive and ends with a send: its
    iterator makes as many batches as those of the ranks that read the data.

    Args:
        dataset: its length counts.
    """
    return [()] * len(dataset)
