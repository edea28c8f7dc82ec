"""Are model and optimizer the same on all ranks? And making them so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np

import communicators
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.communicators.model_sync import synchronise_model
from chainermn_ng.communicators.parameters import (
    digest_of_array,
    named_parameters,
    named_persistents,
    to_host,
)
from chainermn_ng.optimizers import optimizer_state
from chainermn_ng.optimizers.multi_node_optimizer import MultiNodeOptimizer
from communicators import MismatchError

_MAX_DIFFERENCES = 5
_MAX_TEXT = 60


def bcast_state(optimizer: Any, root: int = 0, comm: Any = None) -> None:
    """Give all ranks the model and the optimizer of one. Collective.

    Sends parameters, persistent values, the optimizer's state, step count and
    hyperparameters. Call it after one rank alone has loaded a snapshot or changed a
    hyperparameter.

    Args:
        optimizer: set up on a model; one of
            :func:`~chainermn_ng.create_multi_node_optimizer`, or one of Chainer's.
        root: the rank that has them.
        comm: whose ranks take part: communicator of this package, of the engine, or
            of mpi4py. Needed for an optimizer of Chainer's, which knows none.

    Raises:
        TypeError: no optimizer, or no communicator.
        ValueError: no such root, or no model; on all ranks.
        MismatchError: the ranks' models differ in path, shape or dtype of a
            parameter; on all ranks.
    """
    if isinstance(optimizer, MultiNodeOptimizer):
        _check_communicator(optimizer, comm)
        optimizer.bcast_state(root)
        return
    with _engine_and_label(optimizer, comm, "bcast_state") as (engine, label):
        engine.agree(label, error=_missing_model(optimizer))
        synchronise_model(engine, optimizer.target, label, root=root)
        state = None
        if engine.rank == root:
            state = optimizer_state.capture(optimizer, hyperparameters=True)
        state = engine.bcast_obj(state, root=root)
        if engine.rank != root:
            optimizer_state.apply(optimizer, state)


def check_state(optimizer: Any, comm: Any = None, *, persistents: bool = True) -> None:
    """Check that model and optimizer are the same on all ranks. Collective.

    Compares the bits of parameters, persistent values and the optimizer's state, its
    step count, hyperparameters and hooks, and which parameters are frozen. While all
    are equal, one digest a rank travels; then one for each entry. Costs reading the
    whole model once.

    Args:
        optimizer: as in :func:`bcast_state`.
        comm: likewise.
        persistents: with ``False`` persistent values are left out. Running statistics
            of :class:`chainer.links.BatchNormalization` are those of each rank's own
            batches, and differ.

    Raises:
        MismatchError: something differs; on all ranks, with one text that names up to
            five entries, and the ranks.
        TypeError: no optimizer, or no communicator.
        ValueError: no model; on all ranks.
    """
    with _engine_and_label(optimizer, comm, "check_state") as (engine, label):
        error = _missing_model(optimizer)
        engine.agree(label, f"persistents={persistents}", error=error)
        entries = _entries(optimizer, persistents)
        digest = optimizer_state.digest_of(entries)
        if len(set(engine.allgather_obj(digest))) == 1:
            return
        tables = engine.allgather_obj(entries)
    raise MismatchError(f"{label}: the ranks are not in step: {_differences(tables)}")


def _check_communicator(optimizer: MultiNodeOptimizer, comm: Any) -> None:
    if comm not in (None, optimizer.communicator, optimizer.communicator.engine):
        raise ValueError("this optimizer has a communicator of its own; leave comm out")


@contextlib.contextmanager
def _engine_and_label(
    optimizer: Any, comm: Any, what: str
) -> Iterator[tuple[communicators.CommunicatorBase, str]]:
    if isinstance(optimizer, MultiNodeOptimizer):
        _check_communicator(optimizer, comm)
        yield optimizer.communicator.engine, optimizer._label(what)
        return
    if not isinstance(optimizer, chainer.Optimizer):
        raise TypeError(
            f"{what}: expected an optimizer; got {type(optimizer).__qualname__}"
        )
    if comm is None:
        raise TypeError(
            f"{what}: an optimizer of Chainer's knows no communicator; give comm="
        )
    with engine_of(comm) as engine:
        yield engine, f"{what}({type(optimizer).__name__})"


def _missing_model(optimizer: Any) -> ValueError | None:
    if getattr(optimizer, "target", None) is None:
        return ValueError("the optimizer has no model; call setup(model) before")
    return None


def _entries(optimizer: Any, persistents: bool) -> dict[str, str]:
    """Return a short text for each part of the state, equal where the part is."""
    entries = {"step count": f"{optimizer.t}", "epoch": f"{optimizer.epoch}"}
    hyperparam = getattr(optimizer, "hyperparam", None)
    if hyperparam is not None:
        for name, value in hyperparam.get_dict().items():
            entries[f"hyperparameter {name}"] = _describe(value)
    entries["loss scale"] = _describe(optimizer._loss_scale)
    entries["hooks"] = ", ".join(optimizer_state.hook_texts(optimizer)) or "none"
    for path, parameter in named_parameters(optimizer.target):
        entries[f"parameter {path}"] = _describe(parameter.raw_array)
        if parameter.update_rule is not None:
            entries.update(_rule_entries(path, parameter.update_rule))
    if persistents:
        for path, link, attribute in named_persistents(optimizer.target):
            entries[f"persistent value {path}"] = _describe(vars(link)[attribute])
    return entries


def _rule_entries(path: str, rule: chainer.UpdateRule) -> dict[str, str]:
    entries = {
        f"step count of {path}": f"{rule.t}",
        f"update of {path}": "on" if rule.enabled else "off (frozen)",
        f"hooks of {path}": ", ".join(optimizer_state.hook_texts(rule)) or "none",
    }
    for name, value in optimizer_state.own_values(rule.hyperparam).items():
        entries[f"hyperparameter {name} of {path}"] = _describe(value)
    if rule._fp32_param is not None:
        array = rule._fp32_param.array
        entries[f"float32 copy of {path}"] = _describe(array)
    for name, value in (rule.state or {}).items():
        entries[f"optimizer state {name} of {path}"] = _describe(value)
    return entries


def _describe(value: Any) -> str:
    value = to_host(value)
    if isinstance(value, np.ndarray) and value.ndim:
        digest = digest_of_array(value).hex()[:12]
        return f"{value.dtype} {value.shape} with digest {digest}"
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | complex | str | tuple):
        text = repr(value)
        if len(text) <= _MAX_TEXT:
            return text
        return f"value with digest {optimizer_state.digest_of(value).hex()[:12]}"
    # An object's own text may hold its address, which differs between ranks.
    return f"a {type(value).__name__}"


def _differences(tables: list[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for table in tables for name in table))
    found = {}
    for name in names:
        texts = [table.get(name, "absent") for table in tables]
        if len(set(texts)) > 1:
            found[name] = _by_rank(texts)
    parts = [f"{name}: {text}" for name, text in list(found.items())[:_MAX_DIFFERENCES]]
    if len(found) > _MAX_DIFFERENCES:
        parts.append(f"and {len(found) - _MAX_DIFFERENCES} more")
    advice = "chainermn_ng.bcast_state(optimizer) makes them the same"
    if any(name.startswith("hooks") for name in found):
        advice += ", but for hooks, which all ranks must add"
    if all(name.startswith("persistent value") for name in found):
        advice += (
            ". Running statistics of a plain batch normalization differ by design: "
            "average them (AllreducePersistent), make them common (create_mnbn_model), "
            "or leave them out (persistents=False)"
        )
    return f"{'; '.join(parts)}. {advice}"


def _by_rank(texts: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    return ", ".join(f"{text} on {_ranks(ranks)}" for text, ranks in groups.items())


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...)"
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
