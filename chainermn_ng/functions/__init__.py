"""Communication that gradients pass through, for models that span several ranks."""

from chainermn_ng.functions.collective_communication import (
    allgather,
    alltoall,
    bcast,
    gather,
    scatter,
)
from chainermn_ng.functions.point_to_point_communication import recv, send
from chainermn_ng.functions.pseudo_connect import pseudo_connect
from chainermn_ng.functions.reductions import allreduce, reduce_scatter

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
