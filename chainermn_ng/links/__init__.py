"""Links of models that span several ranks."""

from chainermn_ng.links.multi_node_chain_list import MultiNodeChainList
from chainermn_ng.links.n_step_rnn import create_multi_node_n_step_rnn

__all__ = [
    "MultiNodeChainList",
    "create_multi_node_n_step_rnn",
]
