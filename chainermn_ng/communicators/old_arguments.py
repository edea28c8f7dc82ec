"""Ways to call collectives that ChainerMN's communicators took beside the documented.

Its interface names the array of ``bcast``, ``gather`` and ``allreduce`` ``data``, as
this package does; its communicators named it ``x``, and their ``bcast`` had the root
as its second argument, where the interface has ``max_buf_len``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

_Method = TypeVar("_Method", bound=Callable[..., Any])


def takes_x(method: _Method) -> _Method:
    """Let a method take its first argument by the name ``x``, too."""

    @functools.wraps(method)
    def with_x(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "x" in kwargs and not args and "data" not in kwargs:
            args = (kwargs.pop("x"),)
        return method(self, *args, **kwargs)

    return with_x  # type: ignore[return-value]


def takes_root_second(method: _Method) -> _Method:
    """Let ``method(data, 1)`` mean the root.

    As a number of bytes, which the second argument is, that of a rank would be absurd.
    """

    @functools.wraps(method)
    def with_root(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and "root" not in kwargs:
            data, second = args
            if isinstance(second, int | np.integer) and 0 <= second < self.size:
                return method(self, data, root=int(second), **kwargs)
        return method(self, *args, **kwargs)

    return with_root  # type: ignore[return-value]
