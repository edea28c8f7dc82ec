"""Extensions of Chainer's trainer for several ranks."""

from chainermn_ng.extensions.flush_gradients import FlushGradients
from chainermn_ng.extensions.multi_node_evaluator import create_multi_node_evaluator

__all__ = ["FlushGradients", "create_multi_node_evaluator"]
