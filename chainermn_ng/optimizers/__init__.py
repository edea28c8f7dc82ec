"""Optimizers that work on all ranks together."""

from chainermn_ng.optimizers.multi_node_optimizer import (
    MultiNodeOptimizer,
    count_first_argument,
    create_multi_node_optimizer,
)

__all__ = [
    "MultiNodeOptimizer",
    "count_first_argument",
    "create_multi_node_optimizer",
]
