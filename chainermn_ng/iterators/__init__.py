"""Iterators that keep the ranks in step."""

from chainermn_ng.iterators.multi_node_iterator import create_multi_node_iterator
from chainermn_ng.iterators.shard_iterator import ShardIterator
from chainermn_ng.iterators.synchronized_iterator import create_synchronized_iterator

__all__ = [
    "ShardIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
]
