"""Making a model the same on all ranks: weights and persistent values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np

import communicators
from chainermn_ng.communicators.parameters import (
    digest_of_array,
    named_parameters,
    named_persistents,
    to_host,
)
from communicators import MismatchError
from communicators.arguments import check_root


@dataclass(frozen=True)
class ParameterState:
    """What the ranks compare of one parameter.

    Attributes:
        name: its path in the model.
        shape: ``None`` if it has not got one yet.
        dtype: as NumPy writes it; empty without a shape.
        digest: of the values, where they are compared.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str = ""
    digest: bytes = b""


@dataclass(frozen=True)
class SyncResult:
    """What a synchronisation found.

    Attributes:
        lazy: paths of the parameters that have a shape on no rank.
        differed: whether some rank held other values (``False`` if not compared).
    """

    lazy: tuple[str, ...]
    differed: bool


def synchronise_model(
    engine: communicators.CommunicatorBase,
    model: chainer.Link,
    label: str,
    *,
    root: int = 0,
    compare: bool = False,
) -> SyncResult:
    """Give all ranks the parameters and persistent values of rank ``root``.

    Collective. A parameter that has no shape on ``root`` yet but on other ranks
    comes from the lowest of these, and the ranks that lack it initialise it; one
    without a shape on all ranks stays so. Persistent values likewise, ``None``
    being the absent value.

    Args:
        engine: the communicator.
        model: changed in place; memory layouts are kept.
        label: names the operation in errors.
        root: whose values all ranks get.
        compare: tell whether the values differed before.

    Raises:
        MismatchError: the ranks' parameters differ in path, shape or dtype, or the
            ranks gave different roots.
        ValueError: no such root; on all ranks.
    """
    error = None
    try:
        check_root(root, engine.size, label)
    except ValueError as failure:
        error = failure
    engine.agree(label, f"root={root}", error=error)
    parameters = dict(named_parameters(model))
    tables = engine.allgather_obj(_states(parameters.items(), compare))
    sources = choose_sources(tables, label, preferred=root)
    differed = bool(_different(tables))
    spread_parameters(engine, parameters, tables, sources, label)
    _spread_persistents(engine, model, root, label)
    lazy = tuple(name for name in parameters if name not in sources)
    return SyncResult(lazy, differed)


def settle_lazy_parameters(
    engine: communicators.CommunicatorBase,
    model: chainer.Link,
    lazy: Sequence[str],
    label: str,
) -> SyncResult:
    """Make parameters equal that a forward pass may just have given their shape.

    Collective, and cheap while no rank has initialised any: one small all-reduce.
    When some rank has, all parameters are compared: Chainer's LSTM, for one, then
    draws the values of parameters anew that had a shape before.

    Args:
        engine: the communicator.
        model: changed in place.
        lazy: paths of the parameters that no rank had initialised before.
        label: names the operation in errors.

    Returns:
        SyncResult: what is still without a shape, and whether the ranks that had
        initialised the same parameter held different values.
    """
    parameters = dict(named_parameters(model))
    n_new = sum(parameters[name].is_initialized for name in lazy)
    engine.agree(label)
    if int(engine.allreduce(np.array(n_new, np.int64), op="max")) == 0:
        return SyncResult(tuple(lazy), False)
    tables = engine.allgather_obj(_states(parameters.items(), compare=True))
    sources = choose_sources(tables, label)
    still_lazy = tuple(name for name in parameters if name not in sources)
    different = _different(tables)
    missing = {s.name for table in tables for s in table if s.shape is None}
    sources = {k: r for k, r in sources.items() if k in different or k in missing}
    spread_parameters(engine, parameters, tables, sources, label)
    return SyncResult(still_lazy, bool(different))


def choose_sources(
    tables: Sequence[Sequence[ParameterState]], label: str, preferred: int = 0
) -> dict[str, int]:
    """Return which rank each parameter's values come from.

    Pure: all ranks call it on the same tables, one per rank, and get the same
    result or the same error.

    Returns:
        dict: path -> ``preferred`` if that rank has initialised the parameter, else
        the lowest rank that has; parameters that none has are absent.

    Raises:
        MismatchError: paths, shapes or dtypes differ between ranks.
    """
    names = [state.name for state in tables[0]]
    for rank, table in enumerate(tables):
        theirs = {state.name for state in table}
        if [state.name for state in table] != names:
            odd = sorted(set(names) ^ theirs)[0]
            here, there = (0, rank) if odd in names else (rank, 0)
            raise MismatchError(
                f"{label}: parameter {odd} exists on rank {here} but not on rank "
                f"{there}; all ranks must build the same model"
            )
    sources = {}
    for states in zip(*tables, strict=True):
        holders = [r for r, state in enumerate(states) if state.shape is not None]
        kinds = {(states[r].shape, states[r].dtype): r for r in reversed(holders)}
        if len(kinds) > 1:
            found = ", ".join(
                f"{shape} {np.dtype(dtype)} on rank {rank}"
                for (shape, dtype), rank in sorted(kinds.items(), key=lambda x: x[1])
            )
            raise MismatchError(
                f"{label}: parameter {states[0].name} has different shapes or dtypes: "
                f"{found}"
            )
        if holders:
            chosen = preferred if preferred in holders else holders[0]
            sources[states[0].name] = chosen
    return sources


def spread_parameters(
    engine: communicators.CommunicatorBase,
    parameters: dict[str, chainer.Parameter],
    tables: Sequence[Sequence[ParameterState]],
    sources: dict[str, int],
    label: str,
) -> None:
    """Broadcast each parameter from its source; initialise it where it is missing."""
    for i, (name, parameter) in enumerate(parameters.items()):
        if name in sources and not parameter.is_initialized:
            state = tables[sources[name]][i]
            parameter.initialize(state.shape)
            # Not the NaN that Chainer fills in: this rank has no gradient of it.
            parameter.cleargrad()
            if parameter.raw_array.dtype != np.dtype(state.dtype):
                parameter.array = parameter.array.astype(state.dtype)
    for source in sorted(set(sources.values())):
        chosen = [name for name in parameters if sources.get(name) == source]
        engine.bcast_arrays(
            [parameters[name].raw_array for name in chosen],
            root=source,
            names=chosen,
            label=label,
        )


def _different(tables: Sequence[Sequence[ParameterState]]) -> set[str]:
    """Return the paths whose values differ between the ranks that have any."""
    return {
        states[0].name
        for states in zip(*tables, strict=True)
        if len({state.digest for state in states if state.shape is not None}) > 1
    }


def _states(parameters: Any, compare: bool) -> list[ParameterState]:
    states = []
    for name, parameter in parameters:
        array = parameter.raw_array
        if array is None:
            states.append(ParameterState(name, None))
        else:
            digest = digest_of_array(array) if compare else b""
            states.append(ParameterState(name, array.shape, array.dtype.str, digest))
    return states


def _spread_persistents(
    engine: communicators.CommunicatorBase, model: chainer.Link, root: int, label: str
) -> None:
    places = {name: (link, attr) for name, link, attr in named_persistents(model)}
    mine = {name: to_host(getattr(link, attr)) for name, (link, attr) in places.items()}
    tables = engine.allgather_obj(
        {name: value is not None for name, value in mine.items()}
    )
    for rank, table in enumerate(tables):
        odd = sorted(set(table) ^ set(tables[0]))
        if odd:
            raise MismatchError(
                f"{label}: persistent value {odd[0]} exists on only one of the ranks "
                f"0 and {rank}; all ranks must build the same model"
            )
    sources = {}
    for name in mine:
        holders = [rank for rank, table in enumerate(tables) if table[name]]
        if holders:
            sources[name] = root if root in holders else holders[0]
    for source in sorted(set(sources.values())):
        chosen = {name: mine[name] for name in mine if sources.get(name) == source}
        received = engine.bcast_obj(chosen, root=source)
        if engine.rank != source:
            for name, value in received.items():
                _set_persistent(*places[name], value)


def _set_persistent(link: chainer.Link, attribute: str, value: Any) -> None:
    old = link.__dict__[attribute]
    if not isinstance(value, np.ndarray):
        link.__dict__[attribute] = value
    elif isinstance(old, chainer.get_array_types()) and old.shape == value.shape:
        old[...] = link.device.send(value.astype(old.dtype, copy=False))
    else:
        link.__dict__[attribute] = link.device.send(value)
