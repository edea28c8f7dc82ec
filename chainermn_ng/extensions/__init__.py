"""Extensions of Chainer's trainer for several ranks."""

from chainermn_ng.extensions.early_stopping import MultiNodeEarlyStoppingTrigger
from chainermn_ng.extensions.flush_gradients import FlushGradients
from chainermn_ng.extensions.generic_evaluator import GenericMultiNodeEvaluator
from chainermn_ng.extensions.multi_node_evaluator import create_multi_node_evaluator

__all__ = [
    "FlushGradients",
    "GenericMultiNodeEvaluator",
    "MultiNodeEarlyStoppingTrigger",
    "create_multi_node_evaluator",
]
