"""Multi-process training for Chainer on today's Python, NumPy and MPI.

Importing it prepares and imports Chainer, and installs what ends the job when one rank
fails. Everything else is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainermn_ng import compat

compat.prepare_chainer()  # before anything below imports chainer

from chainermn_ng import cpu_fallback, global_except_hook  # noqa: E402
from communicators._version import __version__  # noqa: E402
from communicators.call_place import look_through  # noqa: E402
from communicators.lazy_names import lazy_names  # noqa: E402

if TYPE_CHECKING:
    from chainermn_ng import (
        communicators,
        datasets,
        extensions,
        functions,
        iterators,
        links,
        optimizers,
    )
    from chainermn_ng.communicators import CommunicatorBase, create_communicator
    from chainermn_ng.datasets import DataSizeError, scatter_dataset, scatter_index
    from chainermn_ng.devices import choose_device
    from chainermn_ng.extensions import (
        create_multi_node_checkpointer,
        create_multi_node_evaluator,
    )
    from chainermn_ng.links import MultiNodeChainList
    from chainermn_ng.optimizers import (
        bcast_state,
        check_state,
        create_multi_node_optimizer,
    )
    from chainermn_ng.run_once import run_once_per_host
    from chainermn_ng.seeds import set_seed, shared_seed

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "__version__",
    "bcast_state",
    "check_state",
    "choose_device",
    "communicators",
    "compat",
    "cpu_fallback",
    "create_communicator",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "datasets",
    "extensions",
    "functions",
    "global_except_hook",
    "iterators",
    "links",
    "optimizers",
    "run_once_per_host",
    "scatter_dataset",
    "scatter_index",
    "set_seed",
    "shared_seed",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "chainermn_ng.communicators": ["CommunicatorBase", "create_communicator"],
        "chainermn_ng.datasets": ["DataSizeError", "scatter_dataset", "scatter_index"],
        "chainermn_ng.devices": ["choose_device"],
        "chainermn_ng.extensions": [
            "create_multi_node_checkpointer",
            "create_multi_node_evaluator",
        ],
        "chainermn_ng.links": ["MultiNodeChainList"],
        "chainermn_ng.optimizers": [
            "bcast_state",
            "check_state",
            "create_multi_node_optimizer",
        ],
        "chainermn_ng.run_once": ["run_once_per_host"],
        "chainermn_ng.seeds": ["set_seed", "shared_seed"],
    },
)

# An error of a collective names the line of the user's program that called these.
for _package in ("chainer", "chainermn_ng"):
    look_through(_package)


def _why_no_gpu(number: int) -> str | None:
    from chainermn_ng.devices import why_no_gpu

    return why_no_gpu(number)


cpu_fallback.prepare(_why_no_gpu)
global_except_hook._add_hook_if_enabled()
