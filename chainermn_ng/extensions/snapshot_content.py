"""What a snapshot holds of a trainer or another object, and how it comes back."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy as np
from chainer import training
from chainer.serializer import Deserializer
from chainer.serializers import DictionarySerializer, NpzDeserializer
from chainer.training.triggers import IntervalTrigger

from chainermn_ng.extensions import generator_states
from chainermn_ng.extensions.snapshot_reader import (
    ANOTHER_MODEL,
    Elsewhere,
    SnapshotReader,
    some_of,
)
from chainermn_ng.optimizers.master_weights import (
    load_master_weights,
    save_master_weights,
)

_LOSS_SCALE = ("_loss_scale", "_loss_scaling_multiplier", "_loss_scaling_isnan_ever")


def collect(target: Any, generators: Iterable[Any]) -> tuple[dict[str, Any], Any]:
    """Return the arrays and the description of a target's state on this rank.

    Args:
        target: a trainer, an updater, or anything that Chainer can serialize.
        generators: more objects that hold random generators.

    Returns:
        tuple: NumPy arrays by path, and data for JSON.
    """
    serializer = DictionarySerializer()
    serializer.save(target)
    serializer.target.update(collect_master_weights(target))
    meta = describe(target)
    # At last: iterators that fetch ahead start anew when they are serialized, and
    # draw the next order once more.
    meta["generators"] = generator_states.capture(_roots(target, generators))
    arrays = {name: np.asarray(array) for name, array in serializer.target.items()}
    return arrays, meta


def describe(target: Any) -> dict[str, Any]:
    """Return what loading has to know beside the arrays, without random generators."""
    return {
        "parameters": sorted(_parameter_names(target)),
        "extensions": list(_extensions(target)),
        "iterators": {
            name: getattr(iterator, "epoch_detail", None)
            for name, iterator in _iterators(target).items()
        },
        "hyperparameters": {
            name: _hyperparameters(optimizer)
            for name, optimizer in optimizers_of(target).items()
        },
    }


def collect_master_weights(target: Any) -> dict[str, Any]:
    """Return the float32 values that Chainer's own optimizers do not save, by path."""
    serializer = DictionarySerializer()
    for path, optimizer in _plain_optimizers(target).items():
        save_master_weights(optimizer, serializer[path] if path else serializer)
    return dict(serializer.target)


def parameters_digest(target: Any, arrays: Mapping[str, Any]) -> bytes:
    """Return 16 bytes that are equal on ranks with the same model.

    Those of the parameters, where there are some, without persistent values, which
    may differ between ranks; else those of all arrays.
    """
    names = sorted(_parameter_names(target) & set(arrays)) or sorted(arrays)
    hasher = hashlib.blake2b(digest_size=16)
    for name in names:
        array = arrays[name]
        hasher.update(f"{name} {array.shape} {array.dtype.str};".encode())
        if array.dtype.hasobject:
            hasher.update(repr(array.tolist()).encode())
        else:
            hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.digest()


def digest_of_model(model: chainer.Link) -> bytes:
    """Return 16 bytes that are equal on ranks whose parameters are."""
    serializer = DictionarySerializer()
    serializer.save(model)
    arrays = {name: np.asarray(array) for name, array in serializer.target.items()}
    return parameters_digest(model, arrays)


def load(
    target: Any, npz: Any, meta: Mapping[str, Any], file: str, *, is_own: bool
) -> list[str]:
    """Load a snapshot into a target, all but random generators.

    Extensions without a state in it stay as they are. Extensions that are added to a
    trainer later get their state when they are.

    Args:
        target: as for :func:`collect`.
        npz: the open snapshot.
        meta: its description.
        file: its name, for messages.
        is_own: whether it is this rank's of as many ranks. Otherwise iterators keep
            the order that they have, and go on in the same epoch after the same part
            of it.

    Returns:
        What could not be restored, in words.

    Raises:
        KeyError, ValueError, TypeError: it is of another program: an entry is missing
            or does not fit, or it has parameters that the model has not. The target
            may have been changed in part.
    """
    reader = SnapshotReader(npz, file)
    deserializer: Deserializer = reader
    elsewhere = None
    if not is_own:
        deserializer = elsewhere = Elsewhere(reader, _iterators(target), meta)
    known = set(meta["extensions"])
    unknown = [name for name in _extensions(target) if name not in known]
    with _without_extensions(target, unknown):
        deserializer.load(target)
    rounded = []
    for path, optimizer in _plain_optimizers(target).items():
        branch = deserializer[path] if path else deserializer
        rounded += load_master_weights(optimizer, branch)
    ignored = _ignored(target, reader, meta, file)
    for name in unknown:
        _begin_here(target, target._extensions[name].trigger)
    if isinstance(target, training.Trainer):
        _load_later(target, npz, known.difference(_extensions(target)))
    lost = [
        f"the state of the extension {name}"
        for name in unknown
        if is_own and _has_state(target._extensions[name].extension)
    ]
    lost += [f"the float32 values of {name}" for name in rounded]
    lost += [] if elsewhere is None else elsewhere.lost()
    return lost + ignored


def restore_generators(
    target: Any, meta: Mapping[str, Any], generators: Iterable[Any]
) -> list[str]:
    """Set this rank's random generators; return what could not be set, in words."""
    return generator_states.restore(meta["generators"], _roots(target, generators))


def restore_hyperparameters(target: Any, meta: Mapping[str, Any]) -> list[str]:
    """Set learning rates and the like; return what was changed, in words."""
    changes = []
    for name, optimizer in optimizers_of(target).items():
        saved = meta["hyperparameters"].get(name, {})
        now = _hyperparameters(optimizer)
        for key, value in saved.items():
            if key in now and now[key] != value:
                changes.append(f"{key} of {name}: {value!r} instead of {now[key]!r}")
                setattr(optimizer, key, value)
    return changes


def initialize_shifts(target: Any) -> None:
    """Let extensions that shift a rate set it, where they began before the load.

    Chainer's have their last value in the snapshot, and set it when the run begins.
    """
    for entry in _extensions(target).values():
        if getattr(entry.extension, "_last_value", None) is not None:
            entry.extension.initialize(target)


def optimizers_of(target: Any) -> dict[str, Any]:
    """Return the optimizers of a trainer or updater, or the target if it is one."""
    updater = _updater(target)
    if hasattr(updater, "get_all_optimizers"):
        return dict(updater.get_all_optimizers())
    if hasattr(target, "update") and hasattr(target, "new_epoch"):
        return {"main": target}
    return {}


# -- the parts of a target -----------------------------------------------------------


def _updater(target: Any) -> Any:
    return target.updater if isinstance(target, training.Trainer) else target


def _plain_optimizers(target: Any) -> dict[str, chainer.Optimizer]:
    """Return the optimizers that are Chainer's own, by their path in a snapshot."""
    head = "updater/" if isinstance(target, training.Trainer) else ""
    return {
        "" if optimizer is target else f"{head}optimizer:{name}": optimizer
        for name, optimizer in optimizers_of(target).items()
        if isinstance(optimizer, chainer.Optimizer)
    }


def _extensions(target: Any) -> Any:
    return target._extensions if isinstance(target, training.Trainer) else {}


def _iterators(target: Any) -> dict[str, Any]:
    return dict(getattr(_updater(target), "_iterators", {}))


def _roots(target: Any, generators: Iterable[Any]) -> dict[str, Any]:
    return {**_iterators(target), "generators": list(generators)}


def _parameter_names(target: Any) -> set[str]:
    if isinstance(target, chainer.Link):
        return {path.lstrip("/") for path, _ in target.namedparams()}
    if not hasattr(_updater(target), "get_all_optimizers"):
        return set()
    prefix = "updater/" if isinstance(target, training.Trainer) else ""
    return {
        f"{prefix}model:{name}/{path.lstrip('/')}"
        for name, optimizer in optimizers_of(target).items()
        for path, _ in optimizer.target.namedparams()
    }


def _hyperparameters(optimizer: Any) -> dict[str, Any]:
    values = {}
    if getattr(optimizer, "hyperparam", None) is not None:
        values.update(optimizer.hyperparam.get_dict())
    if getattr(optimizer, "_loss_scaling_is_dynamic", False):
        # Else the program says it.
        values.update({key: getattr(optimizer, key, None) for key in _LOSS_SCALE})
    plain = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in values.items()
    }
    return {k: v for k, v in plain.items() if isinstance(v, bool | int | float)}


def _ignored(
    target: Any, reader: SnapshotReader, meta: Mapping[str, Any], file: str
) -> list[str]:
    """Look at what the snapshot holds of model and optimizers that nobody has read.

    Raises:
        ValueError: parameters.
    """
    unread = reader.unread()
    too_many = sorted(unread & set(meta.get("parameters", ())))
    if too_many:
        raise ValueError(
            f"{file} holds parameters that the model has not: {some_of(too_many)}. "
            f"{ANOTHER_MODEL}"
        )
    if not hasattr(_updater(target), "get_all_optimizers"):
        return []
    head = "updater/" if isinstance(target, training.Trainer) else ""
    kinds = f"{head}model:", f"{head}optimizer:"
    # Of these the optimizer tells.
    rest = [
        path
        for path in sorted(unread)
        if path.startswith(kinds) and not re.search("/(n_in_flight$|in_flight/)", path)
    ]
    return [f"entries that the program has not: {some_of(rest)}"] if rest else []


# -- extensions that come and go -----------------------------------------------------


@contextlib.contextmanager
def _without_extensions(target: Any, names: Iterable[str]) -> Iterator[None]:
    """Hide some extensions of a trainer from its ``serialize``."""
    extensions = _extensions(target)
    everything = dict(extensions)
    for name in names:
        del extensions[name]
    try:
        yield
    finally:
        extensions.clear()
        extensions.update(everything)


def _has_state(extension: Any) -> bool:
    """Tell whether an extension saves anything; most inherit a method that does not."""
    serialize = getattr(type(extension), "serialize", None)
    return serialize not in (None, training.Extension.serialize)


def _begin_here(trainer: training.Trainer, trigger: Any) -> None:
    """Let a trigger without a saved state count from now, not from iteration 0."""
    if isinstance(trigger, IntervalTrigger):
        trigger._previous_iteration = trainer.updater.iteration
        detail = getattr(trainer.updater, "epoch_detail", None)
        if detail is not None:
            trigger._previous_epoch_detail = detail


def _load_later(trainer: training.Trainer, npz: Any, names: set[str]) -> None:
    """Load the state of extensions when they are added to the trainer."""
    heads = [f"{kind}/{name}/" for name in names for kind in _KINDS]
    kept = {key: npz[key] for key in npz if key.startswith(tuple(heads))}
    add = type(trainer).extend

    def extend(extension: Any, *args: Any, **kwargs: Any) -> None:
        add(trainer, extension, *args, **kwargs)
        entry = trainer._extensions[extension.name]
        if extension.name not in names:
            _begin_here(trainer, entry.trigger)
            return
        for kind, part in zip(_KINDS, (extension, entry.trigger), strict=True):
            if hasattr(part, "serialize"):
                part.serialize(NpzDeserializer(kept)[kind][extension.name])

    trainer.extend = extend


_KINDS = "extensions", "extension_triggers"
