"""Which ranks hold the same: replica sets."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence


def parse_replica_sets(
    replica_sets: Iterable[int | Iterable[int]], size: int
) -> list[list[int]]:
    """Return the replica sets as sorted lists of ranks; a rank is in one of them.

    Args:
        replica_sets: each a rank or several of them. Ranks that are in none make up
            one more.
        size: number of ranks.

    Raises:
        TypeError: no ranks.
        ValueError: a rank that does not exist, or is in two sets; an empty set.
    """
    sets = [_members(replica_set) for replica_set in replica_sets]
    named = [rank for members in sets for rank in members]
    for rank in named:
        if not 0 <= rank < size:
            raise ValueError(
                f"replica_sets: rank {rank} does not exist; there are {size} ranks"
            )
        if named.count(rank) > 1:
            raise ValueError(f"replica_sets: rank {rank} is named twice")
    rest = sorted(set(range(size)) - set(named))
    return [*sets, rest] if rest else sets


def _members(replica_set: int | Iterable[int]) -> Sequence[int]:
    try:
        return [operator.index(replica_set)]
    except TypeError:
        members = sorted({operator.index(rank) for rank in replica_set})
    if not members:
        raise ValueError("replica_sets: a set is empty")
    return members
