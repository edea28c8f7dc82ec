"""One small interface over the Python bindings of NCCL. The only part that calls them.

``load("cupy")`` and ``load("pynccl")`` return objects with the same methods; unique ids
of the one are good for the other, in other processes.
"""

from __future__ import annotations

import importlib
import os
import threading

from communicators.errors import UnavailableError
from communicators.nccl_bindings.interface import NcclBinding, NcclCommunicator

__all__ = [
    "BINDINGS",
    "BINDING_VARIABLE",
    "NcclBinding",
    "NcclCommunicator",
    "default_name",
    "load",
    "missing",
]

#: Names for :func:`load`.
BINDINGS = ("cupy", "pynccl")

#: Environment variable that names the binding where a program does not.
BINDING_VARIABLE = "CHAINERMN_NG_NCCL_BINDING"

_CLASSES = {"cupy": "CupyBinding", "pynccl": "PyncclBinding"}

_loaded: dict[str, NcclBinding] = {}
_lock = threading.Lock()


def load(name: str) -> NcclBinding:
    """Return a binding; the same one at each call. The first call imports its package.

    Args:
        name: one of :data:`BINDINGS`.

    Raises:
        ValueError: unknown name.
        UnavailableError: its package or NCCL's library is missing or too old; the text
            says what to install.
    """
    _check(name, "nccl_binding")
    with _lock:
        if name not in _loaded:
            module = importlib.import_module(f"{__name__}.{name}")
            try:
                _loaded[name] = getattr(module, _CLASSES[name])()
            except UnavailableError as error:
                raise UnavailableError(f"NCCL binding {name!r}: {error}") from error
        return _loaded[name]


def missing(name: str) -> str | None:
    """Return why a binding cannot be loaded; None if it can.

    Raises:
        ValueError: unknown name.
    """
    try:
        load(name)
    except UnavailableError as error:
        return str(error)
    return None


def default_name() -> str:
    """Return the binding to use where a program names none.

    Raises:
        ValueError: :data:`BINDING_VARIABLE` holds an unknown name.
    """
    name = os.environ.get(BINDING_VARIABLE) or "cupy"
    _check(name, BINDING_VARIABLE)
    return name


def _check(name: str, what: str) -> None:
    if name not in BINDINGS:
        raise ValueError(f"{what} {name!r} is unknown; known: {', '.join(BINDINGS)}")
