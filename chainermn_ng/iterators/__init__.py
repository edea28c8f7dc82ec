"""Iterators that keep the ranks in step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
    from chainermn_ng.iterators.multi_node_iterator import create_multi_node_iterator
    from chainermn_ng.iterators.shard_iterator import ShardIterator
    from chainermn_ng.iterators.synchronized_iterator import (
        create_synchronized_iterator,
    )

__all__ = [
    "ShardIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.iterators.multi_node_iterator": ["create_multi_node_iterator"],
        "chainermn_ng.iterators.shard_iterator": ["ShardIterator"],
        "chainermn_ng.iterators.synchronized_iterator": [
            "create_synchronized_iterator"
        ],
    },
)
