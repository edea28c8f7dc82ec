"""Import Chainer's modules with names and fixes that they alone can see.

Some of Chainer's modules import what no longer exists (``pkg_resources``,
``numpy.distutils``) or read what NumPy dropped. A finder hands them a loader that

1. runs the module's code with an ``__import__`` of its own, so that the stand-ins
   are seen by that module and never enter ``sys.modules`` or ``numpy``;
2. then applies the fixes for that module, before anyone else sees it.

It works whenever Chainer is imported, and in any thread.
"""

from __future__ import annotations

import builtins
import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

Fix = Callable[[ModuleType], None]


def scoped_builtins(stand_ins: Mapping[str, Any]) -> dict[str, Any]:
    """Return builtins whose import statement answers some names itself.

    Args:
        stand_ins: full name of a module -> what ``import name`` binds. For a dotted
            name that is, as in Python, the stand-in for its first part.
    """

    def scoped_import(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0 and not fromlist and name in stand_ins:
            return stand_ins[name]
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    return {**vars(builtins), "__import__": scoped_import}


class PatchingLoader(importlib.abc.Loader):
    """Load one module by its own loader, with stand-ins and fixes.

    Args:
        loader: the loader that the import system found for the module.
        stand_ins: see :func:`scoped_builtins`; may be empty.
        fix: called with the module after its code ran; may be None.
        explain: turns an error of the module's code into a clearer one, or returns
            None to let the error through.
    """

    def __init__(
        self,
        loader: Any,
        stand_ins: Mapping[str, Any],
        fix: Fix | None,
        explain: Callable[[Exception], ImportError | None] | None,
    ) -> None:
        self._loader = loader
        self._stand_ins = stand_ins
        self._fix = fix
        self._explain = explain

    def __getattr__(self, name: str) -> Any:
        # get_source, get_resource_reader, path, ...: asked by inspect, linecache and
        # importlib.resources. Private names are never asked of the inner loader, and
        # would recurse while copy or pickle build an empty instance.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._run(module)
        except Exception as error:
            clearer = self._explain(error) if self._explain else None
            if clearer is None:
                raise
            raise clearer from error
        if self._fix is not None:
            self._fix(module)

    def _run(self, module: ModuleType) -> None:
        if not self._stand_ins:
            self._loader.exec_module(module)
            return
        code: CodeType = self._loader.get_code(module.__name__)
        vars(module)["__builtins__"] = scoped_builtins(self._stand_ins)
        exec(code, vars(module))


class ChainerFinder(importlib.abc.MetaPathFinder):
    """Find the modules of Chainer that need stand-ins or fixes.

    Args:
        stand_ins: module name -> stand-ins for its import statements.
        fixes: module name -> fix.
        explain: module name -> see :class:`PatchingLoader`.
    """

    def __init__(
        self,
        stand_ins: Mapping[str, Mapping[str, Any]],
        fixes: Mapping[str, Fix],
        explain: Mapping[str, Callable[[Exception], ImportError | None]],
    ) -> None:
        self._stand_ins = stand_ins
        self._fixes = fixes
        self._explain = explain
        # Every import of the program asks this finder first.
        self._names = frozenset({*stand_ins, *fixes, *explain})

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            spec.loader = PatchingLoader(
                spec.loader,
                self._stand_ins.get(fullname, {}),
                self._fixes.get(fullname),
                self._explain.get(fullname),
            )
        return spec
