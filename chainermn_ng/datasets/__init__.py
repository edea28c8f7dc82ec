"""Data sets shared out between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from communicators.lazy_names import lazy_names

if TYPE_CHECKING:
    from chainermn_ng.datasets.empty_dataset import create_empty_dataset
    from chainermn_ng.datasets.epochs import (
        get_epoch_trigger,
        get_n_iterations_for_one_epoch,
    )
    from chainermn_ng.datasets.order import SeededOrder
    from chainermn_ng.datasets.scatter import (
        DataSizeError,
        scatter_dataset,
        scatter_index,
    )
    from chainermn_ng.datasets.scattered_dataset import ScatteredDataset, padding_mask
    from chainermn_ng.datasets.shared import share_in_host

__all__ = [
    "DataSizeError",
    "ScatteredDataset",
    "SeededOrder",
    "create_empty_dataset",
    "get_epoch_trigger",
    "get_n_iterations_for_one_epoch",
    "padding_mask",
    "scatter_dataset",
    "scatter_index",
    "share_in_host",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.datasets.empty_dataset": ["create_empty_dataset"],
        "chainermn_ng.datasets.epochs": [
            "get_epoch_trigger",
            "get_n_iterations_for_one_epoch",
        ],
        "chainermn_ng.datasets.order": ["SeededOrder"],
        "chainermn_ng.datasets.scatter": [
            "DataSizeError",
            "scatter_dataset",
            "scatter_index",
        ],
        "chainermn_ng.datasets.scattered_dataset": ["ScatteredDataset", "padding_mask"],
        "chainermn_ng.datasets.shared": ["share_in_host"],
    },
)
