"""Extensions of Chainer's trainer for several ranks."""

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
