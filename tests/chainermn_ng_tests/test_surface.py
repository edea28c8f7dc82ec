"""Every public name of ChainerMN 7.8.1 is here, and takes the same arguments.

ChainerMN comes with Chainer, so the real one is what this package is compared with.
Ours may have more. Where it has less, or other defaults, the reason stands in
``DIFFERENCES``, and each entry there must still be one.
"""

from __future__ import annotations

import importlib
import warnings

import numpy as np
import pytest
from helpers.ranks import assert_all_ranks
from helpers.surfaces import (
    differences,
    import_if_there,
    public_names,
    signature_differences,
)

import chainermn_ng  # makes Chainer importable, and ChainerMN with it

OLD = "chainermn"
NEW = "chainermn_ng"

#: The documented modules, whose every name is public.
MODULES = [
    "",
    "communicators",
    "datasets",
    "extensions",
    "functions",
    "global_except_hook",
    "iterators",
    "links",
    "nccl",
    "optimizers",
    "testing",
]

#: Objects whose classes are not public, but which scripts hold: theirs and ours.
OBJECTS = {
    "communicator": (
        "communicators.mpi_communicator_base:MpiCommunicatorBase",
        "communicators:ChainerCommunicator",
    ),
    "optimizer": (
        "optimizers:_MultiNodeOptimizer",
        "optimizers:MultiNodeOptimizer",
    ),
    "double buffering optimizer": (
        "optimizers:_DoubleBufferingOptimizer",
        "optimizers:DoubleBufferingOptimizer",
    ),
    "checkpointer": (
        "extensions.checkpoint:_MultiNodeCheckpointer",
        "extensions:MultiNodeCheckpointer",
    ),
    "multi-node snapshot": (
        "extensions._multi_node_snapshot:_MultiNodeSnapshot",
        "extensions:MultiNodeSnapshot",
    ),
}

# Stand in the package itself, and are compared there.
_IN_PACKAGE = ("CommunicatorBase", "create_communicator")

_BASE = "made by create_communicator; ours holds an engine communicator"
_KWARGS = "an option that is not known is an error, not accepted and dropped"
_ANY_TAG = "-1 is MPI.ANY_TAG; None and MPI.ANY_TAG mean the same here"
_OLD_ARGUMENTS = "takes x= and the root as second argument, too: test_old_arguments"
_INNER = "a part of the optimizer's own work that no script called"
_AUTO = "auto takes what is best here, on CPUs as well; pure_nccl needs GPUs"

#: Deliberate differences, with their reasons.
DIFFERENCES = {
    "CommunicatorBase.__init__": _BASE,
    "CommunicatorBase.recv_obj": "as ChainerMN's communicators had it: status, tag",
    "CommunicatorBase.set_config": _KWARGS,
    "communicator.__init__": _BASE,
    "communicator.allreduce": _OLD_ARGUMENTS,
    "communicator.bcast": _OLD_ARGUMENTS,
    "communicator.bcast_obj": "None stands for 256 MiB, too",
    "communicator.gather": _OLD_ARGUMENTS,
    "communicator.recv_obj": _ANY_TAG,
    "communicator.set_config": _KWARGS,
    "create_communicator": _AUTO,
    "double buffering optimizer.is_changed": _INNER,
    "double buffering optimizer.multi_node_mean_grad_async": _INNER,
    "double buffering optimizer.swap_grad": _INNER,
    "double buffering optimizer.wait": _INNER,
    "multi-node snapshot.on_error": "parameters are named as in Chainer's Extension",
    "optimizer.is_changed": _INNER,
}


@pytest.fixture(scope="module")
def old():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(OLD)


def load(package, path):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def found_in_modules():
    for module in MODULES:
        before = importlib.import_module(f"{OLD}.{module}".rstrip("."))
        after = import_if_there(f"{NEW}.{module}".rstrip("."))
        if after is None:
            yield module, "is missing"
            continue
        for name in public_names(before):
            path = f"{module}.{name}".lstrip(".")
            if path in (f"communicators.{n}" for n in _IN_PACKAGE):
                continue  # the same object
            if not hasattr(after, name):
                yield path, "is missing"
            else:
                yield from differences(
                    getattr(before, name), getattr(after, name), path, OLD
                )


def found_in_objects():
    for name, (theirs, ours) in OBJECTS.items():
        yield from differences(load(OLD, theirs), load(NEW, ours), name, OLD)


@pytest.mark.parallel([1, 2])
def test_old_arguments(comm):
    root = comm.size - 1
    x = np.array([comm.rank])
    results = [
        comm.bcast(x, root),
        comm.bcast(x=x, root=root),
        comm.bcast(x, None, root),
        comm.bcast(x, 1 << 20, root),
    ]
    assert_all_ranks(comm, all(y[0] == root for y in results), f"{results}")
    total = comm.allreduce(x=x)
    gathered = comm.gather(x=x, root=root)
    ok = total[0] == sum(range(comm.size))
    ok = ok and (gathered is None) == (comm.rank != root)
    assert_all_ranks(comm, ok, f"{total} {gathered}")
    third = chainermn_ng.create_communicator("naive", comm.mpi_comm, np.float16)
    dtype = third.engine.allreduce_grad_dtype
    third.finalize()
    assert_all_ranks(comm, dtype == np.float16, f"{dtype}")


def test_names_and_signatures(old):
    found = dict(found_in_modules()) | dict(found_in_objects())
    news = {path: text for path, text in found.items() if path not in DIFFERENCES}
    assert not news, "\n".join(f"{path}: {text}" for path, text in news.items())
    gone = sorted(set(DIFFERENCES) - set(found))
    assert not gone, f"no differences any more: {gone}"


def test_the_comparison_sees_what_is_missing():
    def theirs(a, b, c=1, *, d=2, **rest):
        return a, b, c, d, rest

    def ours(b, a, c=3, *, e, f=1):
        return a, b, c, e, f

    assert signature_differences(theirs, theirs) == ""
    assert signature_differences(theirs, ours) == (
        "a is not parameter 0; b is not parameter 1; c is 1 by default there, 3 by "
        "default here; no d; no **rest; e must be given"
    )
