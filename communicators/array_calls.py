"""What a call on many arrays is: checked once, and known again at the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from communicators.agreement import digest_of
from communicators.buckets import ArraySpec
from communicators.devices.kinds import CPU, as_array, kind_of
from communicators.dtypes import result_dtype

_MAX_CACHED = 64

#: Names, shapes, dtypes and kinds of memory of the arrays.
Key = tuple[tuple[str, tuple[int, ...], np.dtype[Any], str | None], ...]


class ArraysCall:
    """One call on many arrays, the same whenever it is repeated.

    Args:
        title: what the ranks compare as the operation.
        key: what they compare of the arrays.
        present: which of them this rank holds.
        groups: lengths of groups of arrays.

    Attributes:
        digest (bytes): of ``key``.
        details: names and specs as text, made only when an error needs them.
    """

    def __init__(
        self,
        title: str,
        key: Key,
        present: Sequence[bool],
        groups: Sequence[int] = (),
    ) -> None:
        self.title = title
        self.present = present
        self.groups = groups
        self.details = _LazyDetails(key)
        self.digest = digest_of(list(self.details))
        self._plans: dict[Any, Any] = {}

    def plan(self, settings: Any, make: Callable[[], Any]) -> Any:
        """Return what was planned for it.

        Args:
            settings: all that it depends on beside the call.
            make: plans.
        """
        plan = self._plans.get(settings)
        if plan is None:
            # Which arrays some rank has may be another selection at every step.
            plan = _keep(self._plans, settings, make())
        return plan

    def shown(self) -> str:
        """Return what errors tell of it."""
        return f"{len(self.details)} arrays"


class CallCache:
    """The calls of one communicator so far."""

    def __init__(self) -> None:
        self._by_key: dict[Any, ArraysCall] = {}
        # Calls in which all arrays are NumPy's, found without a look at each name;
        # and whether each array is the owner of its memory.
        self._by_specs: dict[Any, tuple[ArraysCall, bool]] = {}

    def known(
        self, arrays: Sequence[Any], settings: Any, names: Sequence[str] | None
    ) -> tuple[ArraysCall | None, bool]:
        """Return the call if it has been made before and may be made again.

        And whether no two of the arrays can share memory.

        Args:
            arrays: whatever the user gave.
            settings: all that it depends on beside the arrays and their names.
            names: of the arrays, or ``None``.
        """
        try:
            call, all_own = self._by_specs[_specs(arrays, settings, names)]
        except (AttributeError, KeyError, TypeError):
            return None, False  # new, or something is no array
        if len(set(map(id, arrays))) < len(arrays):
            return None, False
        return call, all_own

    def add(
        self,
        title: str,
        settings: Any,
        names: Sequence[str] | None,
        arrays: Sequence[Any],
        groups: Sequence[int] = (),
    ) -> ArraysCall:
        """Return the call on arrays that have been checked and may be written.

        Args:
            title: what the ranks compare as the operation.
            settings: as in :meth:`known`.
            names: as the user gave them.
            arrays: arrays or specs.
            groups: lengths of groups of arrays.
        """
        given_names = default_names(arrays, names)
        key = _key(given_names, arrays)
        present = tuple([not isinstance(array, ArraySpec) for array in arrays])
        call = self._by_key.get((settings, key, present))
        if call is None:
            call = ArraysCall(title, key, present, groups)
            _keep(self._by_key, (settings, key, present), call)
        if all(type(array) is np.ndarray for array in arrays):
            # Only views share memory.
            all_own = all(array.flags.owndata for array in arrays)
            specs = _specs(arrays, settings, names)
            _keep(self._by_specs, specs, (call, all_own))
        return call


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    """Put a value into a cache that is emptied when it is full; return the value."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value
    return value


class _LazyDetails(Sequence[tuple[str, str]]):
    def __init__(self, key: Key) -> None:
        self._key = key

    def __len__(self) -> int:
        return len(self._key)

    def __getitem__(self, index: Any) -> Any:
        name, shape, dtype, kind = self._key[index]
        return name, str(ArraySpec(shape, dtype, kind or CPU))


def _specs(arrays: Sequence[Any], settings: Any, names: Sequence[str] | None) -> Any:
    # The flags say whether an array is writable, and whether it owns its memory.
    return (
        settings,
        None if names is None else tuple(names),
        tuple([(type(a), a.shape, a.dtype, a.flags.num) for a in arrays]),
    )


def _key(names: Sequence[str], arrays: Sequence[Any]) -> Key:
    return tuple(
        (
            name,
            array.shape,
            array.dtype,
            array.kind if isinstance(array, ArraySpec) else kind_of(array),
        )
        for name, array in zip(names, arrays, strict=True)
    )


def default_names(arrays: Sequence[Any], names: Sequence[str] | None) -> Sequence[str]:
    """Return the names, or numbers in their place."""
    if names is None:
        return [f"array {i}" for i in range(len(arrays))]
    return names


def as_arrays(names: Sequence[str], arrays: Sequence[Any], label: str) -> Sequence[Any]:
    """Let GPU arrays of other packages be arrays of CuPy; leave specs alone.

    Raises:
        TypeError: something is no array.
    """
    return [
        array if type(array) is np.ndarray else _as_one_array(name, array, label)
        for name, array in zip(names, arrays, strict=True)
    ]


def _as_one_array(name: str, array: Any, label: str) -> Any:
    if isinstance(array, np.generic):
        raise TypeError(
            f"{label}: {name} is a scalar of NumPy, which cannot be written in "
            "place; give an array of shape ()"
        )
    if isinstance(array, ArraySpec):
        return array
    if isinstance(array, np.ndarray):
        # Of a subclass, which may have other ideas of shapes. Its memory is written.
        return array.view(np.ndarray)
    return as_array(array, f"{label}: {name}")


def check_names(names: Sequence[str], arrays: Sequence[Any], label: str) -> None:
    """Refuse names that are not one for each array, and an array given twice.

    Raises:
        ValueError: they are; the text says which.
    """
    if len(names) != len(arrays):
        raise ValueError(f"{label}: {len(names)} names for {len(arrays)} arrays")
    seen: dict[int, str] = {}
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, ArraySpec) and id(array) in seen:
            raise ValueError(
                f"{label}: {seen[id(array)]} and {name} are the same array, which is "
                "written in place; give it once"
            )
        seen[id(array)] = name


def check_writable(name: str, array: Any, label: str) -> None:
    """Refuse read-only arrays.

    Raises:
        ValueError: it is.
    """
    if not getattr(array.flags, "writeable", True):
        raise ValueError(f"{label}: {name} is read-only; it is written in place")


def check_reducible(name: str, array: Any, op: str, label: str) -> None:
    """Refuse what cannot be reduced in place.

    Raises:
        TypeError: the dtype has no such reduction, or one of another dtype.
        ValueError: read-only, or missing where the operation needs it.
    """
    if isinstance(array, ArraySpec):
        if op not in ("sum", "mean"):
            raise ValueError(
                f"{label}: {name} is missing here; only sum and mean take that"
            )
    else:
        check_writable(name, array, label)
    if result_dtype(array.dtype, op, label) != array.dtype:
        raise TypeError(
            f"{label}: {name}: the {op} of {array.dtype} has another dtype, so it "
            "cannot be written in place"
        )
