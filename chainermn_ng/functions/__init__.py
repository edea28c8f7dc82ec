"""Communication that gradients pass through, for models that span several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.functions.collective_communication": [
            "allgather",
            "alltoall",
            "bcast",
            "gather",
            "scatter",
        ],
        "chainermn_ng.functions.point_to_point_communication": ["recv", "send"],
        "chainermn_ng.functions.pseudo_connect": ["pseudo_connect"],
        "chainermn_ng.functions.reductions": ["allreduce", "reduce_scatter"],
    },
)
