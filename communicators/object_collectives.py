"""Moving any picklable object between ranks, however large."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import guarded
from communicators.arguments import NO_ROOT, check_one_per_rank, enter
from communicators.dtypes import Array, check_op

if TYPE_CHECKING:
    from communicators.agreement import Agreement
    from communicators.transports.messages import Messenger

#: A reduction of objects by name, or a function of two.
ObjectOp = str | Callable[[Any, Any], Any]


def pickled(obj: object, operation: str) -> Array:
    """Return the pickle of ``obj`` as a uint8 array.

    Raises:
        TypeError: it cannot be pickled; the text names the part that cannot.
    """
    try:
        return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)
    except Exception as error:
        raise TypeError(
            f"{operation}: cannot pickle {_culprit(obj)} "
            f"({type(error).__name__}: {error})"
        ) from error


def _culprit(obj: object, path: str = "", depth: int = 3) -> str:
    """Name the innermost attribute or item of ``obj`` that cannot be pickled."""
    here = f"{path} ({type(obj).__qualname__})" if path else type(obj).__qualname__
    if depth == 0:
        return here
    if isinstance(obj, dict):
        parts = [(f"{path}[{key!r}]", value) for key, value in obj.items()]
    elif isinstance(obj, list | tuple):
        parts = [(f"{path}[{i}]", value) for i, value in enumerate(obj)]
    elif isinstance(getattr(obj, "__dict__", None), dict):
        parts = [(f"{path}.{name}", value) for name, value in vars(obj).items()]
    else:
        return here
    for name, value in parts:
        try:
            pickle.dumps(value)
        except Exception:
            return _culprit(value, name, depth - 1)
    return here


def _types(objs: Sequence[Any]) -> str:
    return ", ".join(type(obj).__qualname__ for obj in objs)


def _combine(op: ObjectOp) -> Callable[[Any, Any], Any]:
    if callable(op):
        return op
    check_op(op)
    if op in ("sum", "mean"):
        return lambda a, b: a + b
    if op == "prod":
        return lambda a, b: a * b
    pick: Callable[[Any, Any], Any] = max if op == "max" else min
    ufunc = np.maximum if op == "max" else np.minimum
    return lambda a, b: (
        ufunc(a, b)
        if isinstance(a, np.ndarray | np.generic | float)
        or isinstance(b, np.ndarray | np.generic | float)
        else pick(a, b)
    )


class ObjectCollectives:
    """The object collectives of one communicator.

    Objects travel as pickles, in messages below 2 GiB each. A rank that cannot
    pickle or unpickle makes all ranks raise. Contracts are in
    :class:`communicators.base.CommunicatorBase`.
    """

    def __init__(self, messenger: Messenger, agreement: Agreement) -> None:
        self._messenger = messenger
        self._agreement = agreement
        self.rank = messenger.rank
        self.size = messenger.size

    @guarded
    def bcast(self, obj: Any, max_buf_len: int | None, root: int) -> Any:
        own = [obj] if self.rank == root else []
        data = self._enter("bcast_obj", own, root, max_buf_len)
        nbytes = self._messenger.share_from(data[0].size if data else None, root)
        packed = data[0] if data else np.empty(nbytes, np.uint8)
        self._messenger.broadcast(packed, root, max_buf_len)
        loaded = self._load("bcast_obj", [] if data else [packed])
        return obj if data else loaded[0]

    @guarded
    def gather(self, obj: Any, root: int) -> list[Any] | None:
        (packed,) = self._enter("gather_obj", [obj], root)
        sizes = self._messenger.share(packed.size)
        parts = [np.empty(n, np.uint8) for n in sizes] if self.rank == root else []
        self._messenger.exchange([(root, packed)], list(enumerate(parts)), "gather_obj")
        loaded = self._load("gather_obj", parts)
        return loaded if self.rank == root else None

    @guarded
    def allgather(self, obj: Any) -> list[Any]:
        (packed,) = self._enter("allgather_obj", [obj])
        sizes = self._messenger.share(packed.size)
        parts = [np.empty(n, np.uint8) for n in sizes]
        outgoing = [(dest, packed) for dest in range(self.size)]
        self._messenger.exchange(outgoing, list(enumerate(parts)), "allgather_obj")
        return self._load("allgather_obj", parts)

    @guarded
    def alltoall(self, objs: Sequence[Any]) -> list[Any]:
        packed = self._enter_rows("alltoall_obj", objs)
        table = self._messenger.share([data.size for data in packed])
        parts = [np.empty(sizes[self.rank], np.uint8) for sizes in table]
        outgoing = list(enumerate(packed))
        self._messenger.exchange(outgoing, list(enumerate(parts)), "alltoall_obj")
        return self._load("alltoall_obj", parts)

    @guarded
    def scatter(self, objs: Sequence[Any] | None, root: int) -> Any:
        packed = self._enter_rows("scatter_obj", objs, root)
        sizes = self._messenger.share_from([data.size for data in packed], root)
        part = np.empty(sizes[self.rank], np.uint8)
        self._messenger.exchange(list(enumerate(packed)), [(root, part)], "scatter_obj")
        return self._load("scatter_obj", [part])[0]

    @guarded
    def allreduce(self, obj: Any, op: ObjectOp) -> Any:
        error: Exception | None = None
        try:
            combine = _combine(op)
            pickled(obj, "allreduce_obj")
        except (TypeError, ValueError) as failure:
            error = failure
        name = op if isinstance(op, str) else getattr(op, "__qualname__", repr(op))
        self._agreement.check(
            "allreduce_obj",
            f"op={name}",
            error=error,
            shown=lambda: _types([obj]),
        )
        value, error = self._reduce_to_first(obj, combine)
        if self.rank == 0 and error is None and op == "mean":
            try:
                value = value / self.size
            except Exception as failure:
                error = failure
        self._agreement.check("allreduce_obj, combining", error=error)
        return self.bcast(value, None, 0)

    def _reduce_to_first(
        self, value: Any, combine: Callable[[Any, Any], Any]
    ) -> tuple[Any, Exception | None]:
        """Reduce along a binomial tree; neighbours in rank order are combined."""
        error: Exception | None = None
        step = 1
        while step < self.size:
            if self.rank % (2 * step):
                try:
                    packed = pickled(value, "allreduce_obj")
                except TypeError as failure:
                    error, packed = error or failure, pickled(None, "allreduce_obj")
                self._exchange_sized(packed, self.rank - step, None)
                return None, error
            if self.rank + step < self.size:
                part = self._exchange_sized(None, None, self.rank + step)
                if error is None:
                    try:
                        value = combine(value, pickle.loads(part.data))
                    except Exception as failure:
                        error = failure
            step *= 2
        return value, error

    def _exchange_sized(
        self, packed: Array | None, dest: int | None, source: int | None
    ) -> Array:
        label = "allreduce_obj"
        if packed is not None and dest is not None:
            size = np.array([packed.size], np.int64).view(np.uint8)
            self._messenger.exchange([(dest, size), (dest, packed)], [], label)
            return packed
        assert source is not None
        count = np.empty(1, np.int64)
        self._messenger.exchange([], [(source, count.view(np.uint8))], label)
        part = np.empty(int(count[0]), np.uint8)
        self._messenger.exchange([], [(source, part)], label)
        return part

    def send(self, obj: Any, dest: int, tag: int) -> None:
        try:
            packed = pickled(obj, "send_obj")
        except TypeError as error:
            # The receiver waits for this message; it gets the reason instead.
            self._messenger.send((None, str(error)), [], dest, tag)
            raise
        self._messenger.send((packed.size, None), [packed], dest, tag)

    def recv(self, source: int, tag: int, status: Any = None) -> Any:
        received: list[Array] = []

        def allocate(header: tuple[Any, str | None]) -> list[Array]:
            if isinstance(header[0], tuple):
                # Arrays: taken all the same, so that the next message is found.
                return [np.empty(spec.nbytes, np.uint8) for spec in header[0][1]]
            if header[0] is not None:
                received.append(np.empty(header[0], np.uint8))
            return received

        message, sender, sent_tag = self._messenger.receive(source, tag, allocate)
        nbytes, refused = message
        if status is not None:
            status.Set_source(sender)
            status.Set_tag(sent_tag)
        if nbytes is None:
            raise TypeError(f"recv_obj: rank {sender} could not send: {refused}")
        if isinstance(nbytes, tuple):
            raise TypeError(
                f"recv_obj: rank {sender} sent arrays, by send; receive them by recv"
            )
        return pickle.loads(received[0].data)

    # -- parts ---

    def _enter(
        self,
        operation: str,
        objs: Sequence[Any],
        root: Any = NO_ROOT,
        max_buf_len: int | None = None,
    ) -> list[Array]:
        return enter(
            self._agreement,
            operation,
            lambda: [pickled(obj, operation) for obj in objs],
            size=self.size,
            root=root,
            max_buf_len=max_buf_len,
            shown=lambda _: _types(objs),
        )

    def _enter_rows(
        self, operation: str, objs: Any, root: Any = NO_ROOT
    ) -> list[Array]:
        def prepare() -> list[Array]:
            if root is not NO_ROOT and root != self.rank:
                return []
            check_one_per_rank(objs, self.size, operation, "objects")
            return [pickled(obj, operation) for obj in objs]

        return enter(
            self._agreement,
            operation,
            prepare,
            size=self.size,
            root=root,
            shown=lambda packed: _types(objs) if packed else "",
        )

    def _load(self, operation: str, parts: Sequence[Array]) -> list[Any]:
        error = None
        loaded: list[Any] = []
        try:
            loaded = [pickle.loads(part.data) for part in parts]
        except Exception as failure:
            error = TypeError(
                f"{operation}: rank {self.rank} cannot unpickle what it received "
                f"({type(failure).__name__}: {failure})"
            )
        self._agreement.check(f"{operation}, unpickling", error=error)
        return loaded
