"""Optimizers that work on all ranks together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.optimizers.double_buffering": ["DoubleBufferingOptimizer"],
        "chainermn_ng.optimizers.factory": ["create_multi_node_optimizer"],
        "chainermn_ng.optimizers.multi_node_optimizer": ["MultiNodeOptimizer"],
        "chainermn_ng.optimizers.samples": ["count_first_argument"],
        "chainermn_ng.optimizers.state_in_step": ["bcast_state", "check_state"],
    },
)
