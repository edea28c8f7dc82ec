"""Moving arrays between ranks: every fixed-size dtype, any shape and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.arguments import NO_ROOT, check_one_per_rank, enter
from communicators.buckets import ArraySpec
from communicators.dtypes import Array, check_fixed_size

if TYPE_CHECKING:
    from communicators.agreement import Agreement
    from communicators.transports.messages import Messenger

# What the receiver must know: whether it is a tuple, and each array's spec.
_Header = tuple[bool, list[ArraySpec]]
# The header, and the arrays themselves.
_Prepared = tuple[_Header, list[Array]]


def as_array_list(data: object, operation: str) -> tuple[bool, list[Array]]:
    """Return whether ``data`` is a sequence, and its arrays.

    NumPy scalars count as zero-dimensional arrays.

    Raises:
        TypeError: anything else, or a dtype of Python objects.
    """
    is_tuple = isinstance(data, tuple | list)
    items: Sequence[Any] = data if is_tuple else [data]  # type: ignore[assignment]
    arrays = []
    for item in items:
        if isinstance(item, np.ma.MaskedArray):
            raise TypeError(
                f"{operation}: a masked array would lose its mask; fill it, or use "
                f"{operation}_obj"
            )
        if not isinstance(item, np.ndarray | np.generic):
            raise TypeError(
                f"{operation}: expected a NumPy array or a tuple of arrays; got "
                f"{type(item).__module__}.{type(item).__qualname__}. For other "
                f"objects there is {operation}_obj"
            )
        array = np.asarray(item)
        check_fixed_size(array.dtype, operation)
        arrays.append(array)
    return is_tuple, arrays


def _to_bytes(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.itemsize == 0:
        return np.empty(0, np.uint8)
    return flat.view(np.uint8)


def _allocate(header: _Header) -> tuple[list[Array], list[Array]]:
    arrays = [np.empty(spec.shape, spec.dtype) for spec in header[1]]
    return arrays, [_to_bytes(array) for array in arrays]


def _assemble(header: _Header, arrays: list[Array]) -> Any:
    return tuple(arrays) if header[0] else arrays[0]


def _by_rank(rows: Sequence[_Prepared]) -> list[tuple[int, Array]]:
    return [
        (dest, _to_bytes(array))
        for dest, (_, arrays) in enumerate(rows)
        for array in arrays
    ]


class ArrayCollectives:
    """The data-moving array collectives of one communicator.

    Contracts are in :class:`communicators.base.CommunicatorBase`.
    """

    def __init__(self, messenger: Messenger, agreement: Agreement) -> None:
        self._messenger = messenger
        self._agreement = agreement
        self.rank = messenger.rank
        self.size = messenger.size

    def bcast(self, data: Any, max_buf_len: int | None, root: int) -> Any:
        own = data if self.rank == root else ()
        header, arrays = self._enter("bcast", own, root, max_buf_len)
        header = self._messenger.share_from(header, root)
        if self.rank == root:
            for array in arrays:
                self._messenger.broadcast(_to_bytes(array), root, max_buf_len)
            return data
        received, views = _allocate(header)
        for view in views:
            self._messenger.broadcast(view, root, max_buf_len)
        return _assemble(header, received)

    def gather(self, data: Any, root: int) -> Any:
        header, arrays = self._enter("gather", data, root)
        headers = self._messenger.share(header)
        outgoing = [(root, _to_bytes(array)) for array in arrays]
        if self.rank != root:
            self._messenger.exchange(outgoing, [], "gather")
            return None
        return self._collect("gather", outgoing, headers)

    def allgather(self, data: Any) -> Any:
        header, arrays = self._enter("allgather", data)
        headers = self._messenger.share(header)
        views = [_to_bytes(array) for array in arrays]
        outgoing = [(dest, view) for dest in range(self.size) for view in views]
        return self._collect("allgather", outgoing, headers)

    def alltoall(self, data: Any) -> Any:
        rows = self._enter_rows("alltoall", data)
        table = self._messenger.share([header for header, _ in rows])
        headers = [headers[self.rank] for headers in table]
        return self._collect("alltoall", _by_rank(rows), headers)

    def scatter(self, data: Any, root: int) -> Any:
        rows = self._enter_rows("scatter", data, root)
        headers = self._messenger.share_from([header for header, _ in rows], root)
        received, views = _allocate(headers[self.rank])
        incoming = [(root, view) for view in views]
        self._messenger.exchange(_by_rank(rows), incoming, "scatter")
        return _assemble(headers[self.rank], received)

    def send(self, data: Any, dest: int, tag: int) -> None:
        try:
            header, arrays = self._prepare("send", data)
        except (TypeError, ValueError) as error:
            # The receiver waits for this message; it gets the reason instead.
            self._messenger.send((None, str(error)), [], dest, tag)
            raise
        views = [_to_bytes(array) for array in arrays]
        self._messenger.send((header, None), views, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        received: list[Array] = []

        def allocate(message: tuple[_Header | None, str | None]) -> list[Array]:
            if message[0] is None:
                return []
            arrays, views = _allocate(message[0])
            received.extend(arrays)
            return views

        (header, refused), sender, _ = self._messenger.receive(source, tag, allocate)
        if header is None:
            raise TypeError(f"recv: rank {sender} could not send: {refused}")
        return _assemble(header, received)

    # -- parts ---

    def _prepare(self, operation: str, data: Any) -> _Prepared:
        is_tuple, arrays = as_array_list(data, operation)
        return (is_tuple, [ArraySpec.of(array) for array in arrays]), arrays

    def _enter(
        self,
        operation: str,
        data: Any,
        root: Any = NO_ROOT,
        max_buf_len: int | None = None,
    ) -> _Prepared:
        return enter(
            self._agreement,
            operation,
            lambda: self._prepare(operation, data),
            size=self.size,
            root=root,
            max_buf_len=max_buf_len,
        )

    def _enter_rows(
        self, operation: str, data: Any, root: Any = NO_ROOT
    ) -> list[_Prepared]:
        def prepare() -> list[_Prepared]:
            if root is not NO_ROOT and root != self.rank:
                return []
            check_one_per_rank(data, self.size, operation, "arrays")
            return [self._prepare(operation, item) for item in data]

        return enter(self._agreement, operation, prepare, size=self.size, root=root)

    def _collect(
        self,
        operation: str,
        outgoing: list[tuple[int, Array]],
        headers: list[_Header],
    ) -> tuple[Any, ...]:
        incoming = []
        received = []
        for source, header in enumerate(headers):
            arrays, views = _allocate(header)
            received.append(_assemble(header, arrays))
            incoming += [(source, view) for view in views]
        self._messenger.exchange(outgoing, incoming, operation)
        return tuple(received)
