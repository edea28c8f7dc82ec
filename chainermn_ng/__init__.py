"""Multi-process training for Chainer on today's Python, NumPy and MPI."""

from chainermn_ng import compat

compat.prepare_chainer()  # before anything below imports chainer

from chainermn_ng import (  # noqa: E402
    communicators,
    cpu_fallback,
    datasets,
    extensions,
    functions,
    global_except_hook,
    iterators,
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
from chainermn_ng.devices import choose_device, why_no_gpu  # noqa: E402
from chainermn_ng.extensions import (  # noqa: E402
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
)
from chainermn_ng.links import MultiNodeChainList  # noqa: E402
from chainermn_ng.optimizers import (  # noqa: E402
    bcast_state,
    check_state,
    create_multi_node_optimizer,
)
from chainermn_ng.run_once import run_once_per_host  # noqa: E402
from chainermn_ng.seeds import set_seed, shared_seed  # noqa: E402
from communicators import __version__  # noqa: E402
from communicators.call_place import look_through  # noqa: E402

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

# An error of a collective names the line of the user's program that called these.
for _package in ("chainer", "chainermn_ng"):
    look_through(_package)

cpu_fallback.prepare(why_no_gpu)
global_except_hook._add_hook_if_enabled()
