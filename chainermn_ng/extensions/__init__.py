"""Extensions of Chainer's trainer for several ranks."""

from chainermn_ng.extensions.checkpointer import (
    MultiNodeCheckpointer,
    create_multi_node_checkpointer,
)
from chainermn_ng.extensions.early_stopping import MultiNodeEarlyStoppingTrigger
from chainermn_ng.extensions.flush_gradients import FlushGradients
from chainermn_ng.extensions.generic_evaluator import GenericMultiNodeEvaluator
from chainermn_ng.extensions.multi_node_evaluator import create_multi_node_evaluator
from chainermn_ng.extensions.replica_snapshots import (
    MultiNodeSnapshot,
    multi_node_snapshot,
)

__all__ = [
    "FlushGradients",
    "GenericMultiNodeEvaluator",
    "MultiNodeCheckpointer",
    "MultiNodeEarlyStoppingTrigger",
    "MultiNodeSnapshot",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "multi_node_snapshot",
]
