"""Numbers that tell models and optimizers of equal shape apart on all ranks."""

from __future__ import annotations

import os
import uuid
import weakref
from typing import Any


class ModelNumbers:
    """Gives each object a number at its first use, without keeping it alive.

    All ranks use the same models in the same order, so a model has the same number
    on all of them; a rank that uses another one at that point is found by it.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._n_given = 0

    def number_of(self, model: Any) -> int:
        """Return the model's number, a new one at its first use."""
        key = id(model)
        if key not in self._numbers:
            numbers = self._numbers
            reference = weakref.ref(model, lambda _: numbers.pop(key, None))
            self._numbers[key] = reference, self._n_given
            self._n_given += 1
        return self._numbers[key][1]


_PROCESS = uuid.uuid4().hex
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def reference_within_process(obj: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what ``__reduce__`` needs to find ``obj`` again in this process.

    A communicator cannot be rebuilt from bytes elsewhere, but links and optimizers
    that hold one are copied by pickling, within a process or into its forks.
    """
    _alive[id(obj)] = obj
    return _find, (_PROCESS, id(obj), type(obj).__name__)


def _find(process: str, key: int, type_name: str) -> Any:
    found = _alive.get(key) if process == _PROCESS else None
    if found is None:
        raise TypeError(
            f"a pickled {type_name} can be loaded only in the process that made it, "
            f"while it is in use (this is process {os.getpid()}); create a "
            "communicator there instead"
        )
    return found
