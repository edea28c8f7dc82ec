"""Public names of a package that are imported when somebody first asks for them.

A program pays for the modules that it uses, not for all there are. What cannot be seen
from outside stays as if everything had been imported at once: ``from package import
*``, ``dir()``, submodules as attributes, and names that are both a function and the
module it stands in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

# Two threads that import a package and a module of it wait for each other, and Python
# raises an error in one. So one thread at a time follows a name; with a limit, as
# a plain import statement in another thread does not take part in this.
_lock = threading.RLock()
_LIMIT_S = 10.0


def _import_alone(module: str) -> ModuleType:
    has_lock = _lock.acquire(timeout=_LIMIT_S)
    try:
        return importlib.import_module(module)
    finally:
        if has_lock:
            _lock.release()


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return what a package's ``__init__`` binds to ``__getattr__`` and ``__dir__``.

    Python calls them for names that the package does not hold yet (PEP 562). A name is
    kept once it has been found. Threads may ask at the same time: all but one wait.

    Args:
        package: ``__name__`` of the package, which is being imported.
        modules: full name of a module -> public names to be taken from it. Submodules
            of the package need no mention.
    """
    homes = {name: module for module, names in modules.items() for name in names}
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is not None:
            value = getattr(_import_alone(home), name)
            namespace[name] = value
            return value
        submodule = f"{package}.{name}"
        # Not those with an underscore: Python itself asks for many of these.
        if not name.startswith("_") and importlib.util.find_spec(submodule) is not None:
            return importlib.import_module(submodule)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*namespace, *namespace["__all__"]})

    if any(home == f"{package}.{name}" for name, home in homes.items()):
        sys.modules[package].__class__ = _package_class(homes)
    return find, list_names


def _package_class(homes: Mapping[str, str]) -> type[ModuleType]:
    class Package(ModuleType):
        """A package with functions that have the names of their modules.

        When the import system has imported such a module it sets it as the package's
        attribute; the function is what belongs there.
        """

        def __setattr__(self, name: str, value: Any) -> None:
            if isinstance(value, ModuleType) and homes.get(name) == value.__name__:
                value = getattr(value, name)
            super().__setattr__(name, value)

    return Package
