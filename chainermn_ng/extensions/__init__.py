"""Extensions of Chainer's trainer for several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
    from chainermn_ng.extensions.aggregate_observations import AggregateObservations
    from chainermn_ng.extensions.allreduce_persistent import AllreducePersistent
    from chainermn_ng.extensions.check_state import CheckState
    from chainermn_ng.extensions.checkpointer import (
        MultiNodeCheckpointer,
        create_multi_node_checkpointer,
    )
    from chainermn_ng.extensions.early_stopping import MultiNodeEarlyStoppingTrigger
    from chainermn_ng.extensions.flush_gradients import FlushGradients
    from chainermn_ng.extensions.generic_evaluator import GenericMultiNodeEvaluator
    from chainermn_ng.extensions.multi_node_evaluator import create_multi_node_evaluator
    from chainermn_ng.extensions.observation_aggregator import ObservationAggregator
    from chainermn_ng.extensions.rank_zero_only import rank_zero_only
    from chainermn_ng.extensions.replica_snapshots import (
        MultiNodeSnapshot,
        multi_node_snapshot,
    )
    from chainermn_ng.extensions.timeline import Timeline

__all__ = [
    "AggregateObservations",
    "AllreducePersistent",
    "CheckState",
    "FlushGradients",
    "GenericMultiNodeEvaluator",
    "MultiNodeCheckpointer",
    "MultiNodeEarlyStoppingTrigger",
    "MultiNodeSnapshot",
    "ObservationAggregator",
    "Timeline",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "multi_node_snapshot",
    "rank_zero_only",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.extensions.aggregate_observations": ["AggregateObservations"],
        "chainermn_ng.extensions.allreduce_persistent": ["AllreducePersistent"],
        "chainermn_ng.extensions.check_state": ["CheckState"],
        "chainermn_ng.extensions.checkpointer": [
            "MultiNodeCheckpointer",
            "create_multi_node_checkpointer",
        ],
        "chainermn_ng.extensions.early_stopping": ["MultiNodeEarlyStoppingTrigger"],
        "chainermn_ng.extensions.flush_gradients": ["FlushGradients"],
        "chainermn_ng.extensions.generic_evaluator": ["GenericMultiNodeEvaluator"],
        "chainermn_ng.extensions.multi_node_evaluator": ["create_multi_node_evaluator"],
        "chainermn_ng.extensions.observation_aggregator": ["ObservationAggregator"],
        "chainermn_ng.extensions.rank_zero_only": ["rank_zero_only"],
        "chainermn_ng.extensions.replica_snapshots": [
            "MultiNodeSnapshot",
            "multi_node_snapshot",
        ],
        "chainermn_ng.extensions.timeline": ["Timeline"],
    },
)
