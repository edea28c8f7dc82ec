"""States of random generators, kept in snapshots as JSON.

Those of Python, of NumPy (the global ones), and those that objects hold: order
samplers, data sets, transforms. CuPy's cannot be read, so each snapshot gives it a new
seed, and keeps that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import chainer
import numpy as np

import communicators
from chainermn_ng import devices
from chainermn_ng.communicators import ChainerCommunicator

_MAX_DEPTH = 6
# A data set may be a list of millions of samples; of collaborators there are few.
_MAX_ITEMS = 64
_GENERATORS = (np.random.RandomState, np.random.Generator, random.Random)
_NOT_SEARCHED = (
    ChainerCommunicator,
    communicators.CommunicatorBase,
    chainer.Link,
    np.ndarray,
    str,
    bytes,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)


def capture(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all generators of this rank, as data for JSON.

    CuPy's generator is seeded anew where there is a GPU, from these states.

    Args:
        roots: objects that may hold generators of their own, by a name that is the
            same in the program that resumes; see :func:`find_generators`.
    """
    states: dict[str, Any] = {
        "python": _plain(random.getstate()),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "own": {
            path: _plain(_state_of(generator))
            for path, generator in find_generators(roots).items()
        },
        "cupy_seed": None,
    }
    cupy_random = devices.cupy_random()
    if cupy_random is not None:
        digest = hashlib.blake2b(json.dumps(states).encode(), digest_size=4)
        states["cupy_seed"] = int.from_bytes(digest.digest(), "little")
        cupy_random.seed(states["cupy_seed"])
    return states


def restore(states: Mapping[str, Any], roots: Mapping[str, Any]) -> list[str]:
    """Set what :func:`capture` returned.

    Args:
        states: it, possibly after a way through JSON.
        roots: the same objects, in the program that resumes.

    Returns:
        What could not be set, in words.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(_restored(states["numpy"]))
    missing = []
    found = find_generators(roots)
    for path, state in states["own"].items():
        generator = found.pop(path, None)
        if generator is None or not _set_state(generator, _restored(state)):
            missing.append(f"the random generator {path}")
    missing += [f"the random generator {path}, which is new" for path in found]
    cupy_random = devices.cupy_random()
    seed = states["cupy_seed"]
    if cupy_random is not None and seed is not None:
        cupy_random.seed(seed)
    elif cupy_random is not None or seed is not None:
        missing.append("CuPy's random generator: there was or is no GPU")
    return missing


def find_generators(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Find the random generators that objects hold.

    Looks into attributes, short sequences and dictionaries, bound methods and
    ``functools.partial``; not into models, communicators and functions.

    Args:
        roots: the objects by name.

    Returns:
        dict: ``numpy.random.RandomState``, ``numpy.random.Generator`` and
        ``random.Random``, each once, by the way to it, such as
        ``"main.order_sampler._random"``. Without the global ones, and without those
        that have no state, as they take their numbers from the system.
    """
    found: dict[str, Any] = {}
    # By id: two iterators may share one. The global ones are kept apart.
    common = np.random.get_state.__self__, random.getstate.__self__
    seen = {id(item): item for item in common}
    waiting = [(name, item, 0) for name, item in sorted(roots.items())]
    while waiting:
        path, item, depth = waiting.pop(0)
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, _GENERATORS):
            if _can_resume(item):
                found[path] = item
        elif depth < _MAX_DEPTH and not isinstance(item, _NOT_SEARCHED):
            waiting += [(path + key, part, depth + 1) for key, part in _parts(item)]
    return found


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, functools.partial):
        yield ".func", item.func
        yield ".args", item.args
        yield ".keywords", item.keywords
    elif isinstance(item, types.MethodType):
        yield ".__self__", item.__self__
    elif isinstance(item, list | tuple):
        if len(item) <= _MAX_ITEMS:
            yield from ((f"[{i}]", part) for i, part in enumerate(item))
    elif isinstance(item, dict):
        if len(item) <= _MAX_ITEMS:
            yield from ((f"[{key!r}]", part) for key, part in item.items())
    else:
        yield from ((f".{key}", part) for key, part in _attributes(item).items())


def _attributes(item: Any) -> dict[str, Any]:
    return getattr(item, "__dict__", {})


def _can_resume(generator: Any) -> bool:
    """Tell whether a generator has a state, unlike ``random.SystemRandom``."""
    try:
        _state_of(generator)
    except NotImplementedError:
        return False
    return True


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return {"python": generator.getstate()}


def _set_state(generator: Any, state: Any) -> bool:
    """Set a state; False if it belongs to another kind of generator."""
    if isinstance(generator, random.Random):
        if "python" not in state:
            return False
        version, words, gauss = state["python"]
        generator.setstate((version, tuple(words), gauss))
        return True
    is_legacy = isinstance(generator, np.random.RandomState)
    bits = generator._bit_generator if is_legacy else generator.bit_generator
    if state.get("bit_generator") != type(bits).__name__:
        return False
    if is_legacy:
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
    return True


def _plain(state: Any) -> Any:
    """Turn arrays into marked lists; JSON makes lists of tuples by itself."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "values": state.tolist()}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, tuple | list):
        return [_plain(value) for value in state]
    return state


def _restored(state: Any) -> Any:
    if isinstance(state, dict):
        if set(state) == {"dtype", "values"}:
            return np.array(state["values"], state["dtype"])
        return {key: _restored(value) for key, value in state.items()}
    return state
