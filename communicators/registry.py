"""Communicators by name."""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from communicators.errors import UnavailableError

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
    _table[name] = target


def known_communicators() -> list[str]:
    """Return all names, sorted: ours, registered ones and those of entry points."""
    return sorted({*_table, *_entry_points()})


def available_communicators() -> list[str]:
    """Return the names that can be used on this machine, sorted."""
    return [name for name in known_communicators() if _missing(name) is None]


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
    if name not in known_communicators():
        close = difflib.get_close_matches(str(name), known_communicators(), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown communicator {name!r}; known: "
            f"{', '.join(known_communicators())}.{hint}"
        )
    return _load(name)(mpi_comm, **options)


def _load(name: str) -> type[CommunicatorBase]:
    target = _table.get(name)
    if target is None:
        loaded: type[CommunicatorBase] = _entry_points()[name].load()
        return loaded
    if not isinstance(target, str):
        return target
    module_name, _, class_name = target.partition(":")
    try:
        found: type[CommunicatorBase] = getattr(
            importlib.import_module(module_name), class_name
        )
    except ImportError as error:
        raise UnavailableError(
            f"communicator {name!r}: cannot import {target} ({error}). mpi4py and an "
            "MPI library come with: pip install 'chainermn-ng[mpich]'"
        ) from error
    return found


def _missing(name: str) -> str | None:
    if name == "pure_nccl":
        return "no NCCL transport"
    return None


def _entry_points() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
