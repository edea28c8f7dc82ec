"""Communicators by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from communicators.agreement import meet_once
from communicators.errors import CommunicatorError, UnavailableError
from communicators.limits import DEFAULT_TIMEOUT_S, check_timeout

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase

ENTRY_POINT_GROUP = "chainermn_ng.communicators"

_table: dict[str, str | type[CommunicatorBase]] = {
    "auto": "communicators.auto:AutoCommunicator",
    "dummy": "communicators.dummy:DummyCommunicator",
    "flat": "communicators.flat:FlatCommunicator",
    "hierarchical": "communicators.hierarchical:HierarchicalCommunicator",
    "multi_ring": "communicators.multi_ring:MultiRingCommunicator",
    "naive": "communicators.naive:NaiveCommunicator",
    "non_cuda_aware": "communicators.non_cuda_aware:NonCudaAwareCommunicator",
    "pure_nccl": "communicators.pure_nccl:PureNcclCommunicator",
    "single_node": "communicators.single_node:SingleNodeCommunicator",
    "two_dimensional": "communicators.two_dimensional:TwoDimensionalCommunicator",
}


def register_communicator(name: str, target: str | type[CommunicatorBase]) -> None:
    """Add a communicator under a name.

    Args:
        name: the name for :func:`create_communicator`.
        target: the class, or ``"package.module:Class"``, imported at its first use.

    Raises:
        ValueError: the name is taken, or ``target`` is not of that form.
        TypeError: ``target`` is neither a class nor a text.
    """
    if name in _table or name in _entry_points():
        raise ValueError(
            f"register_communicator: the name {name!r} is taken; known: "
            f"{', '.join(known_communicators())}"
        )
    if isinstance(target, str) and target.count(":") != 1:
        raise ValueError(
            f"register_communicator: {target!r}: expected 'package.module:Class'"
        )
    if not isinstance(target, str | type):
        raise TypeError(
            f"register_communicator: expected a class or 'package.module:Class'; got "
            f"{target!r}"
        )
    _table[name] = target


def known_communicators() -> list[str]:
    """Return all names, sorted: ours, registered ones and those of entry points."""
    return sorted({*_table, *_entry_points()})


def available_communicators() -> list[str]:
    """Return the names that can be used on this machine, sorted."""
    return [name for name in known_communicators() if _is_available(name)]


def create_communicator(
    name: str = "auto", mpi_comm: Any = None, **options: Any
) -> CommunicatorBase:
    """Create a communicator by its name. Collective.

    Args:
        name: one of :func:`known_communicators`.
        mpi_comm: mpi4py communicator; ``None`` for all ranks of the job.
        options: those of :class:`communicators.base.CommunicatorBase` and of the
            class itself.

    Raises:
        ValueError: unknown name; the text lists the known ones.
        TypeError: an option that the communicator does not have.
        UnavailableError: something is missing here; the text says what.
        TopologyError: it cannot work on this topology.
    """
    found: type[CommunicatorBase] | None = None
    error: Exception | None = None
    try:
        found = _load(_check_name(name))
        _check_options(name, found, options)
        missing = found.missing()
        if missing:
            raise UnavailableError(
                f"communicator {name!r}: {missing}. Communicators that work here: "
                f"{', '.join(available_communicators()) or 'none'}"
            )
    except (TypeError, ValueError, CommunicatorError) as failure:
        error = failure
    # A name or an option that is wrong on one rank must not leave the others waiting.
    timeout_s = options.get("timeout_s", DEFAULT_TIMEOUT_S)
    try:
        check_timeout(timeout_s)
    except ValueError as failure:
        error, timeout_s = error or failure, DEFAULT_TIMEOUT_S
    meet_once(mpi_comm, timeout_s, f"create_communicator {name!r}", error)
    assert found is not None
    return found(mpi_comm, **options)


def options_of(name: str) -> list[str]:
    """Return the names of the options that a communicator takes.

    Args:
        name: one of :func:`known_communicators`.

    Raises:
        ValueError: unknown name; the text lists the known ones.
        UnavailableError: its module cannot be imported here.
    """
    return _options_of(_load(_check_name(name)))


def _check_name(name: str) -> str:
    if name not in known_communicators():
        close = difflib.get_close_matches(str(name), known_communicators(), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown communicator {name!r}; known: "
            f"{', '.join(known_communicators())}.{hint}"
        )
    return name


def _check_options(
    name: str, cls: type[CommunicatorBase], options: dict[str, Any]
) -> None:
    accepted = _options_of(cls)
    for option in options:
        if option not in accepted:
            raise TypeError(
                f"communicator {name!r} has no option {option!r}; its options: "
                f"{', '.join(accepted)}"
            )


def _options_of(cls: type[CommunicatorBase]) -> list[str]:
    known: list[str] = []
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor) or ancestor is object:
            continue
        signature = inspect.signature(vars(ancestor)["__init__"])
        parameters = list(signature.parameters.values())[1:]
        known += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [option for option in known if option != "mpi_comm"]


def _load(name: str) -> type[CommunicatorBase]:
    from communicators.base import CommunicatorBase

    target = _table.get(name)
    try:
        if target is None:
            target = _entry_points()[name].load()
        elif isinstance(target, str):
            module_name, _, class_name = target.partition(":")
            target = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        what = target or _entry_points()[name].value
        raise UnavailableError(
            f"communicator {name!r}: cannot import {what} ({error})"
        ) from error
    if not (isinstance(target, type) and issubclass(target, CommunicatorBase)):
        raise TypeError(f"communicator {name!r}: {target!r} is no CommunicatorBase")
    return target


def _is_available(name: str) -> bool:
    try:
        return _load(name).missing() is None
    except (UnavailableError, TypeError):
        return False


def _entry_points() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
