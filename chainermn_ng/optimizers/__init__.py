"""Optimizers that work on all ranks together."""

from chainermn_ng.optimizers.double_buffering import DoubleBufferingOptimizer
from chainermn_ng.optimizers.factory import create_multi_node_optimizer
from chainermn_ng.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn_ng.optimizers.samples import count_first_argument
from chainermn_ng.optimizers.state_in_step import bcast_state, check_state

__all__ = [
    "DoubleBufferingOptimizer",
    "MultiNodeOptimizer",
    "bcast_state",
    "check_state",
    "count_first_argument",
    "create_multi_node_optimizer",
]
