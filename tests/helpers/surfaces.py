"""What a package offers, and in what another one differs from it."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

_P = inspect.Parameter
_VARIABLE = (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)


def public_names(module: types.ModuleType) -> list[str]:
    """Return the names of functions, classes and data that a module offers, sorted."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    )


def members(cls: type, package: str) -> dict[str, Any]:
    """Return the public methods and properties that ``package`` defines for a class.

    Constructors and ``__call__`` count; what comes from other packages does not.
    """
    found: dict[str, Any] = {}
    for ancestor in cls.__mro__:
        if ancestor.__module__.partition(".")[0] != package:
            continue
        for name, value in vars(ancestor).items():
            if not name.startswith("_") or name in ("__init__", "__call__"):
                found.setdefault(name, value)
    return found


def signature_differences(old: Any, new: Any) -> str:
    """Return in what calls written for ``old`` could fail with ``new``; or nothing.

    The new one may have further parameters, if calls need not give them.
    """
    try:
        before = list(inspect.signature(old).parameters.values())
        after = list(inspect.signature(new).parameters.values())
    except (TypeError, ValueError):
        return ""
    differences = []
    takes_any = {p.kind for p in after if p.kind in _VARIABLE}
    if takes_any == set(_VARIABLE):
        return ""  # it hands its arguments on
    by_name = {p.name: p for p in after}
    positional = [p.name for p in after if p.kind <= _P.POSITIONAL_OR_KEYWORD]
    for place, p in enumerate(before):
        if p.kind in _VARIABLE:
            if p.kind not in takes_any:
                differences.append(f"no {p}")
            continue
        twin = by_name.pop(p.name, None)
        if twin is None:
            differences.append(f"no {p.name}")
            continue
        if p.kind <= _P.POSITIONAL_OR_KEYWORD and positional[place : place + 1] != [
            p.name
        ]:
            differences.append(f"{p.name} is not parameter {place}")
        if p.default is not _P.empty and p.default != twin.default:
            differences.append(
                f"{p.name} is {_default(p)} there, {_default(twin)} here"
            )
    differences += [
        f"{p.name} must be given"
        for p in by_name.values()
        if p.default is _P.empty and p.kind not in _VARIABLE
    ]
    return "; ".join(differences)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is _P.empty:
        return "without a default"
    return f"{parameter.default!r} by default"


def differences(
    old: Any, new: Any, path: str, package: str
) -> Iterator[tuple[str, str]]:
    """Yield ``(path, difference)`` of one public object and of what it consists of."""
    if isinstance(old, property):
        if callable(new):
            yield path, "is no property"
    elif inspect.isclass(old):
        if not inspect.isclass(new):
            yield path, "is no class"
            return
        for name, value in members(old, package).items():
            there = f"{path}.{name}"
            if not hasattr(new, name):
                yield there, "is missing"
            else:
                found = inspect.getattr_static(new, name)
                yield from differences(value, found, there, package)
    elif callable(old):
        if not callable(new):
            yield path, "cannot be called"
            return
        if text := signature_differences(old, new):
            yield path, text


def import_if_there(name: str) -> types.ModuleType | None:
    """Return a module, or ``None`` where there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise
