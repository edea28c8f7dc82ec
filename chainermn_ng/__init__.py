"""Multi-process training for Chainer on today's Python, NumPy and MPI."""

from chainermn_ng import compat

compat.prepare_chainer()  # before anything below imports chainer

from chainermn_ng import (  # noqa: E402
    communicators,
    datasets,
    extensions,
    functions,
    global_except_hook,
    links,
    optimizers,
)
from chainermn_ng.communicators import (  # noqa: E402
    CommunicatorBase,
    create_communicator,
)
from chainermn_ng.datasets import (  # noqa: E402
    DataSizeError,
    scatter_dataset,
    scatter_index,
)
from chainermn_ng.devices import choose_device  # noqa: E402
from chainermn_ng.extensions import create_multi_node_evaluator  # noqa: E402
from chainermn_ng.optimizers import (  # noqa: E402
    bcast_state,
    check_state,
    create_multi_node_optimizer,
)
from chainermn_ng.run_once import run_once_per_host  # noqa: E402
from chainermn_ng.seeds import set_seed, shared_seed  # noqa: E402
from communicators import __version__  # noqa: E402

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "__version__",
    "bcast_state",
    "check_state",
    "choose_device",
    "communicators",
    "compat",
    "create_communicator",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "datasets",
    "extensions",
    "functions",
    "global_except_hook",
    "links",
    "optimizers",
    "run_once_per_host",
    "scatter_dataset",
    "scatter_index",
    "set_seed",
    "shared_seed",
]

# Of ChainerMN, and not here yet.
_MISSING = frozenset(
    {
        "MultiNodeChainList",
        "create_multi_node_checkpointer",
        "iterators",
    }
)


def __getattr__(name: str) -> object:
    if name in _MISSING:
        raise AttributeError(
            f"chainermn_ng has no {name} yet; this version covers the optimizer, data "
            "sets, the evaluator and the communicators of ChainerMN"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


global_except_hook._add_hook_if_enabled()
