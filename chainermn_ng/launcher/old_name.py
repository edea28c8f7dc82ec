"""Answer ``import chainermn`` with this package.

Chainer 7.8.1 ships its own old ``chainermn``; scripts that import it get ours instead,
and the very same module objects: ``chainermn.datasets is chainermn_ng.datasets``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OLD = "chainermn"
NEW = "chainermn_ng"


class _AliasLoader(importlib.abc.Loader):
    """Gives an already imported module under a second name."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec on the module.
        module.__spec__ = self._spec


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
            raise ModuleNotFoundError(
                f"{NEW}, which stands in for {OLD} here, has no module {name!r}",
                name=fullname,
            )
        module = importlib.import_module(name)
        return importlib.util.spec_from_loader(fullname, _AliasLoader(module))


def answer_old_name() -> None:
    """Install the finder; also forget Chainer's own ``chainermn`` if it is loaded."""
    if any(isinstance(finder, OldNameFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, OldNameFinder())
    for name in list(sys.modules):
        if name == OLD or name.startswith(OLD + "."):
            del sys.modules[name]
