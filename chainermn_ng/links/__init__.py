"""Links that work on the batches of all ranks."""

from chainermn_ng.links.batch_normalization import MultiNodeBatchNormalization
from chainermn_ng.links.create_mnbn_model import create_mnbn_model

__all__ = ["MultiNodeBatchNormalization", "create_mnbn_model"]
