"""Links of models that span several ranks, and of batches that do."""

from chainermn_ng.links.batch_normalization import MultiNodeBatchNormalization
from chainermn_ng.links.create_mnbn_model import create_mnbn_model
from chainermn_ng.links.multi_node_chain_list import MultiNodeChainList
from chainermn_ng.links.n_step_rnn import create_multi_node_n_step_rnn

__all__ = [
    "MultiNodeBatchNormalization",
    "MultiNodeChainList",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
]
