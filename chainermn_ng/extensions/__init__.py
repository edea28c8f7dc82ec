"""Extensions of Chainer's trainer for several ranks."""

from chainermn_ng.extensions.aggregate_observations import AggregateObservations
from chainermn_ng.extensions.allreduce_persistent import AllreducePersistent
from chainermn_ng.extensions.check_state import CheckState
from chainermn_ng.extensions.flush_gradients import FlushGradients
from chainermn_ng.extensions.multi_node_evaluator import create_multi_node_evaluator
from chainermn_ng.extensions.observation_aggregator import ObservationAggregator
from chainermn_ng.extensions.rank_zero_only import rank_zero_only

__all__ = [
    "AggregateObservations",
    "AllreducePersistent",
    "CheckState",
    "FlushGradients",
    "ObservationAggregator",
    "create_multi_node_evaluator",
    "rank_zero_only",
]
