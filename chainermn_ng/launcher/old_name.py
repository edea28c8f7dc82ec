"""Answer ``import chainermn`` with this package.

Chainer 7.8.1 ships its own old ``chainermn``; scripts that import it get ours instead,
and the very same module objects: ``chainermn.datasets is chainermn_ng.datasets``.

Names that stand in another module here are found where ChainerMN has them, too. Not
found are what only its own code used, and the class of each kind of communicator: here
there is one for all kinds, so an ``isinstance`` check for one would always hold.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OLD = "chainermn"
NEW = "chainermn_ng"

#: Module of ChainerMN 7.8.1 -> its names that are elsewhere here: name -> our module.
MOVED: dict[str, dict[str, str]] = {
    "communicators.communicator_base": {"CommunicatorBase": "communicators"},
    "communicators.dummy_communicator": {},
    "communicators.flat_communicator": {},
    "communicators.mpi_communicator_base": {
        # Every communicator is one, there as here.
        "MpiCommunicatorBase": "communicators:ChainerCommunicator",
    },
    "communicators.naive_communicator": {},
    "communicators.non_cuda_aware_communicator": {},
    "communicators.pure_nccl_communicator": {},
    "datasets.scatter": {
        "get_epoch_trigger": "datasets",
        "get_n_iterations_for_one_epoch": "datasets",
    },
    "extensions.checkpoint": {"create_multi_node_checkpointer": "extensions"},
    "extensions.multi_node_early_stopping_trigger": {
        "MultiNodeEarlyStoppingTrigger": "extensions",
    },
    "extensions.multi_node_evaluator": {"GenericMultiNodeEvaluator": "extensions"},
}

#: Class of one kind of communicator -> the name that ``create_communicator`` takes.
KINDS = {
    "DummyCommunicator": "dummy",
    "FlatCommunicator": "flat",
    "NaiveCommunicator": "naive",
    "NonCudaAwareCommunicator": "non_cuda_aware",
    "PureNcclCommunicator": "pure_nccl",
}


class _AliasLoader(importlib.abc.Loader):
    """Gives an already imported module under a second name."""

    def __init__(self, module: ModuleType, old_name: str) -> None:
        self._module = module
        self._old_name = old_name
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec on the module.
        module.__spec__ = self._spec
        _add_moved(module, self._old_name)


class _MovedLoader(importlib.abc.Loader):
    """Makes a module that exists in ChainerMN only."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"Names of {name} that are elsewhere in {NEW}."

        def missing(attribute: str) -> Any:
            if attribute in KINDS:
                # An AttributeError's text would be lost in "from ... import ...".
                raise ImportError(
                    f"{name}.{attribute}: {NEW} has one class for all kinds of "
                    "communicators; make one by "
                    f"create_communicator({KINDS[attribute]!r})",
                    name=name,
                )
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

        module.__dict__["__getattr__"] = missing
        _add_moved(module, name)


def _add_moved(module: ModuleType, old_name: str) -> None:
    for name, place in MOVED.get(old_name.removeprefix(OLD + "."), {}).items():
        path, _, attribute = place.partition(":")
        value = getattr(importlib.import_module(f"{NEW}.{path}"), attribute or name)
        module.__dict__.setdefault(name, value)


class OldNameFinder(importlib.abc.MetaPathFinder):
    """Finds ``chainermn`` and ``chainermn.X`` in ``chainermn_ng``."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != OLD and not fullname.startswith(OLD + "."):
            return None
        name = NEW + fullname.removeprefix(OLD)
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            if fullname.removeprefix(OLD + ".") in MOVED:
                return importlib.util.spec_from_loader(fullname, _MovedLoader())
            raise ModuleNotFoundError(
                f"{NEW}, which stands in for {OLD} here, has no module {name!r}",
                name=fullname,
            )
        module = importlib.import_module(name)
        return importlib.util.spec_from_loader(fullname, _AliasLoader(module, fullname))


def answer_old_name() -> None:
    """Install the finder; also forget Chainer's own ``chainermn`` if it is loaded."""
    if any(isinstance(finder, OldNameFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, OldNameFinder())
    for name in list(sys.modules):
        if name == OLD or name.startswith(OLD + "."):
            del sys.modules[name]
