"""Links of models that span several ranks, and of batches that do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.links.batch_normalization": ["MultiNodeBatchNormalization"],
        "chainermn_ng.links.create_mnbn_model": ["create_mnbn_model"],
        "chainermn_ng.links.multi_node_chain_list": ["MultiNodeChainList"],
        "chainermn_ng.links.n_step_rnn": ["create_multi_node_n_step_rnn"],
    },
)
