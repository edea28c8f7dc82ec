"""Reading a snapshot: what does not fit is named, also on another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import chainer
import numpy as np
from chainer.serializer import Deserializer
from chainer.serializers import NpzDeserializer

ANOTHER_MODEL = (
    "Is the file of another model or program? Then use another name or folder"
)


def some_of(paths: Iterable[str]) -> str:
    """Return the first three of some paths, and how many more there are."""
    first, *rest = list(paths)
    shown = [first, *rest[:2]]
    n_more = len(rest) + 1 - len(shown)
    return ", ".join(shown) + (f" and {n_more} more" if n_more else "")


class SnapshotReader(NpzDeserializer):
    """Chainer's deserializer, whose errors name the entry and the file.

    An array of another shape is an error, also if NumPy could spread it over the
    target.

    Args:
        npz: the open snapshot.
        file: its name, for messages.
        path: where to read.
    """

    def __init__(
        self, npz: Any, file: str, path: str = "", read: set[str] | None = None
    ) -> None:
        super().__init__(npz, path)
        self._file = file
        # One set for all branches.
        self._read = set() if read is None else read

    def unread(self) -> set[str]:
        """Return the paths of the entries that nobody has asked for."""
        return set(self.npz) - self._read

    def __getitem__(self, key: str) -> SnapshotReader:
        path = self.path + key.strip("/") + "/"
        return SnapshotReader(self.npz, self._file, path, self._read)

    def __call__(self, key: str, value: Any) -> Any:
        path = self.path + key.lstrip("/")
        # A KeyError may be expected: then somebody catches it.
        if path not in self.npz:
            raise KeyError(f"{self._file} has no entry {path}. {ANOTHER_MODEL}")
        self._read.add(path)
        entry = self.npz[path]
        try:
            is_array = isinstance(value, chainer.get_array_types())
            if is_array and entry[()] is not None and entry.shape != value.shape:
                raise ValueError(
                    f"its shape is {entry.shape}, here it is {value.shape}"
                )
            return NpzDeserializer({path: entry}, self.path)(key, value)
        except (KeyError, TypeError, ValueError) as error:
            text = f"entry {path} of {self._file}: {error}. {ANOTHER_MODEL}"
            raise type(error)(text) from error


class Elsewhere(Deserializer):
    """Reads the snapshot of another rank: iterators keep their order.

    They go on in the same epoch after the same part of it.

    Args:
        actual: reads the snapshot.
        iterators: of the program, by name.
        meta: the description of the snapshot.
    """

    def __init__(
        self,
        actual: Deserializer,
        iterators: Mapping[str, Any],
        meta: Mapping[str, Any],
        begun: dict[str, bool] | None = None,
    ) -> None:
        self._actual = actual
        self._iterators = iterators
        self._meta = meta
        # Whether an iterator begins its epoch anew, by name; for all branches.
        self._begun = {} if begun is None else begun

    def __getitem__(self, key: str) -> Deserializer:
        kind, _, name = key.partition(":")
        if kind == "iterator":
            detail = self._meta["iterators"].get(name)
            part = 0.0 if detail is None else detail % 1
            self._begun[name] = detail is None or part > 0
            return _IteratorElsewhere(
                self._actual[key], name, self._iterators.get(name), part, self._begun
            )
        return Elsewhere(self._actual[key], self._iterators, self._meta, self._begun)

    def __call__(self, key: str, value: Any) -> Any:
        return self._actual(key, value)

    def lost(self) -> list[str]:
        """Return what iterators could not take over, in words."""
        return [
            f"the place in the epoch of iterator {name}, which begins it anew"
            for name, begins in self._begun.items()
            if begins
        ]


class _IteratorElsewhere(Deserializer):
    _TAKEN = frozenset({"epoch", "is_new_epoch", "previous_epoch_detail"})

    def __init__(
        self,
        actual: Deserializer,
        name: str,
        iterator: Any,
        part: float,
        begun: dict[str, bool],
    ) -> None:
        self._actual = actual
        self._name = name
        self._iterator = iterator
        self._part = part
        self._begun = begun

    def __getitem__(self, key: str) -> Deserializer:
        return self

    def __call__(self, key: str, value: Any) -> Any:
        if key == "current_position":
            return self._share_of(len(getattr(self._iterator, "dataset", ())))
        if key == "iteration_in_epoch":
            # Of ShardIterator, which counts steps, for they are as many on all ranks.
            return self._share_of(getattr(self._iterator, "n_iterations", 0))
        return self._actual(key, value) if key in self._TAKEN else value

    def _share_of(self, n_all: int) -> int:
        self._begun[self._name] = False
        # 2/3 of 6 samples are 4, whatever the last bit says.
        return int(np.floor(self._part * n_all + 1e-6))
