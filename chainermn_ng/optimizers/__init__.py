"""Optimizers that work on all ranks together."""

from chainermn_ng.optimizers.double_buffering import DoubleBufferingOptimizer
from chainermn_ng.optimizers.factory import create_multi_node_optimizer
from chainermn_ng.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn_ng.optimizers.samples import count_first_argument

__all__ = [
    "DoubleBufferingOptimizer",
    "MultiNodeOptimizer",
    "count_first_argument",
    "create_multi_node_optimizer",
]
