"""What the engine asks of a Python binding of NCCL."""

from __future__ import annotations

import abc
import operator
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from communicators.errors import NcclError
from communicators.nccl_bindings.codes import NCCL_OPS, NCCL_TYPES, op_code, type_code
from communicators.nccl_bindings.library import NcclLibrary

__all__ = [
    "NCCL_OPS",
    "NCCL_TYPES",
    "UNIQUE_ID_BYTES",
    "NcclBinding",
    "NcclCommunicator",
    "check_place",
]

T = TypeVar("T")

#: ``NCCL_UNIQUE_ID_BYTES``
UNIQUE_ID_BYTES = 128

INVALID_ARGUMENT = 4
IN_PROGRESS = 7


class NcclBinding(abc.ABC):
    """One Python package's access to NCCL.

    A binding is made once a process, by :func:`communicators.nccl_bindings.load`.

    Attributes:
        name: the name that it is loaded by.

    Args:
        library: the library that the package calls.
    """

    name: str

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library

    def __str__(self) -> str:
        return f"binding {self.name!r} with {self._library}"

    @property
    def version(self) -> int:
        """``ncclGetVersion``'s number, such as 22707 for 2.27.7."""
        return self._library.version

    @property
    def library(self) -> str:
        """Path of the loaded library."""
        return self._library.path

    @property
    def memory(self) -> str:
        """What buffers are: ``"cuda"`` is one device a rank, as NVIDIA's library wants.

        A library for tests may say ``"host"`` (pointers to host memory), or
        ``"device"`` (several ranks may share a device).
        """
        return self._library.memory

    @property
    @abc.abstractmethod
    def has_split(self) -> bool:
        """Whether communicators can :meth:`~NcclCommunicator.split`."""

    @abc.abstractmethod
    def create_unique_id(self) -> bytes:
        """Return a new id of 128 bytes for :meth:`init_rank`.

        Other bindings, in other processes, take it as well.

        Raises:
            NcclError: NCCL could not make one.
        """

    @abc.abstractmethod
    def init_rank(self, size: int, unique_id: bytes, rank: int) -> NcclCommunicator:
        """Join a new communicator, on the current device.

        Collective over its ranks: it returns when all have come, and nothing can end
        it before.

        Args:
            size: number of ranks.
            unique_id: what :meth:`create_unique_id` returned on one of the ranks.
            rank: 0 to ``size - 1``; each of them once.

        Raises:
            ValueError: the id has not 128 bytes, or the rank is not within the size.
            NcclError: NCCL could not make the communicator.
        """

    @abc.abstractmethod
    def group_start(self) -> None:
        """Hold the calls of this thread back until :meth:`group_end`.

        Raises:
            NcclError: NCCL refused.
        """

    @abc.abstractmethod
    def group_end(self) -> None:
        """Start all calls since :meth:`group_start` together.

        Raises:
            NcclError: one of them failed.
        """

    @abc.abstractmethod
    def _code_of(self, error: Exception) -> int | None:
        """Return NCCL's code of an exception of the package; None for any other."""

    def call(self, name: str, function: Callable[..., T], *args: object) -> T:
        """Call a function of the package; for the bindings themselves.

        Args:
            name: NCCL's name of what is called.
            function: takes ``args``.

        Raises:
            NcclError: NCCL returned a code other than 0.
        """
        try:
            return function(*args)
        except Exception as error:
            code = self._code_of(error)
            if code is None:
                raise
            reason = self._library.error_text(code)
            if code == IN_PROGRESS:
                reason += "; NCCL_COMM_BLOCKING=0 is not supported here"
            raise NcclError(name, code, f"{reason}, {self._library}") from error


class NcclCommunicator(abc.ABC):
    """This process's rank in one NCCL communicator.

    Pointers and streams are plain integers. Calls put work on the stream, and may
    return before it is done; buffers stay in use until then. Where the library takes
    host memory the work is done on return. All ranks make the same calls in the same
    order.

    What the methods share:

    - ``dtype``: a key of :data:`NCCL_TYPES`; others raise TypeError.
    - ``op``: a key of :data:`NCCL_OPS`; others raise ValueError.
    - ``n_elems``: 0 to 2**63 - 1; others raise ValueError.
    - ``stream``: a ``cudaStream_t``; 0 is the default stream.
    - They raise NcclError when NCCL fails, and when the communicator has ended.

    Attributes:
        rank: 0 to ``size - 1``.
        size: number of ranks.
        binding: what it was made by.
    """

    def __init__(self, binding: NcclBinding, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.binding = binding
        self._ended: str | None = None
        self._lock = threading.Lock()

    def all_reduce(
        self, sendbuf: int, recvbuf: int, n_elems: int, dtype: str, op: str, stream: int
    ) -> None:
        """Reduce ``n_elems`` elements over all ranks; all get the result.

        In place if both buffers are the same.
        """
        what = self._elements(n_elems, dtype, op)
        self._call("ncclAllReduce", sendbuf, recvbuf, *what, stream=stream)

    def reduce(
        self,
        sendbuf: int,
        recvbuf: int,
        n_elems: int,
        dtype: str,
        op: str,
        root: int,
        stream: int,
    ) -> None:
        """Reduce ``n_elems`` elements over all ranks; the root gets the result.

        In place if both buffers are the same. ``recvbuf`` counts on the root only.
        """
        what = self._elements(n_elems, dtype, op)
        self._call("ncclReduce", sendbuf, recvbuf, *what, root, stream=stream)

    def broadcast(
        self,
        sendbuf: int,
        recvbuf: int,
        n_elems: int,
        dtype: str,
        root: int,
        stream: int,
    ) -> None:
        """Copy the root's ``sendbuf`` into every rank's ``recvbuf``.

        In place if both buffers are the same. ``sendbuf`` counts on the root only.
        """
        what = self._elements(n_elems, dtype)
        self._call("ncclBroadcast", sendbuf, recvbuf, *what, root, stream=stream)

    def reduce_scatter(
        self,
        sendbuf: int,
        recvbuf: int,
        n_elems_per_rank: int,
        dtype: str,
        op: str,
        stream: int,
    ) -> None:
        """Reduce ``size * n_elems_per_rank`` elements; each rank gets its own part.

        In place if ``recvbuf`` is this rank's part of ``sendbuf``.
        """
        what = self._elements(n_elems_per_rank, dtype, op)
        self._call("ncclReduceScatter", sendbuf, recvbuf, *what, stream=stream)

    def all_gather(
        self, sendbuf: int, recvbuf: int, n_elems_per_rank: int, dtype: str, stream: int
    ) -> None:
        """Put every rank's ``n_elems_per_rank`` elements behind each other, by rank.

        In place if ``sendbuf`` is this rank's part of ``recvbuf``.
        """
        what = self._elements(n_elems_per_rank, dtype)
        self._call("ncclAllGather", sendbuf, recvbuf, *what, stream=stream)

    def send(
        self, sendbuf: int, n_elems: int, dtype: str, dest: int, stream: int
    ) -> None:
        """Send to rank ``dest``, which must receive as many elements of that dtype.

        Two ranks that both send first wait for each other for ever, unless their sends
        and receives are in one group.
        """
        what = self._elements(n_elems, dtype)
        self._call("ncclSend", sendbuf, *what, dest, stream=stream)

    def recv(
        self, recvbuf: int, n_elems: int, dtype: str, source: int, stream: int
    ) -> None:
        """Receive what rank ``source`` sends to this one."""
        what = self._elements(n_elems, dtype)
        self._call("ncclRecv", recvbuf, *what, source, stream=stream)

    def split(self, color: int | None, key: int) -> NcclCommunicator | None:
        """Make one communicator for each color. Collective over all ranks.

        Only where the binding's ``has_split`` is true.

        Args:
            color: ranks of one color, 0 or above, come together. None takes part in
                the call, and gets no communicator.
            key: orders the ranks of a color; equal ones keep their order.

        Raises:
            ValueError: the color is negative.
            NotImplementedError: the binding cannot split.
        """
        if color is not None and color < 0:
            raise ValueError(f"color {color}: expected None, or 0 and above")
        if not self.binding.has_split:
            raise NotImplementedError(f"{self.binding} cannot split communicators")
        return self._guard("ncclCommSplit", self._split, color, key)

    def check_async_error(self) -> None:
        """Return if no work of this communicator has failed so far.

        Work that is under way is no error.

        Raises:
            NcclError: some has; ``call`` is ``"ncclCommGetAsyncError"`` and ``code``
                says how it failed.
        """
        try:
            self._guard("ncclCommGetAsyncError", self._check_async_error)
        except NcclError as error:
            if error.code != IN_PROGRESS:
                raise

    def abort(self) -> None:
        """End the communicator, and all its work, at once.

        Any thread may call this, also while another is inside a call of this
        communicator, which then fails. Once the communicator has ended, by this or by
        :meth:`destroy`, nothing happens any more.
        """
        if self._end("aborted"):
            self.binding.call("ncclCommAbort", self._abort)

    def destroy(self) -> None:
        """Free the communicator. Its work should be done: this may wait for it.

        Once it has ended, by this or by :meth:`abort`, nothing happens any more.
        """
        if self._end("destroyed"):
            self.binding.call("ncclCommDestroy", self._destroy)

    def _end(self, how: str) -> bool:
        """Tell whether the caller is the one to end the communicator."""
        # Not held during calls: an abort must get past one that hangs.
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = how
            return True

    def _call(self, name: str, *args: int, stream: int) -> None:
        """Call a function of NCCL: arguments, communicator, stream."""
        self._guard(name, self._invoke, name, args, stream)

    def _guard(self, name: str, function: Callable[..., T], *args: object) -> T:
        """Call a function on this communicator, unless it has ended."""
        if self._ended is not None:
            # What NCCL answers to a null pointer, which is all that is left.
            reason = f"the communicator has been {self._ended}"
            raise NcclError(name, INVALID_ARGUMENT, reason)
        try:
            return self.binding.call(name, function, *args)
        except NcclError as error:
            reason = f"{error.reason}, rank {self.rank} of {self.size}"
            if self._ended is not None:
                reason += f"; the communicator has been {self._ended} meanwhile"
            raise NcclError(name, error.code, reason) from error.__cause__

    def _elements(self, n_elems: int, dtype: str, op: str | None = None) -> list[int]:
        """Return NCCL's count and type, and the reduction if there is one."""
        n_elems = operator.index(n_elems)
        if not 0 <= n_elems < 2**63:
            raise ValueError(f"{n_elems} elements: expected 0 to 2**63 - 1")
        version = self.binding.version
        what = [n_elems, type_code(dtype, version)]
        return what if op is None else [*what, op_code(op, version)]

    @abc.abstractmethod
    def _invoke(self, name: str, args: Sequence[int], stream: int) -> None:
        """Call a function of NCCL by its name; for :meth:`NcclBinding.call`.

        Args:
            name: as in NCCL's C interface.
            args: those that come before the communicator and the stream there.
            stream: the last one.
        """

    @abc.abstractmethod
    def _split(self, color: int | None, key: int) -> NcclCommunicator | None:
        """Call ``ncclCommSplit``."""

    @abc.abstractmethod
    def _check_async_error(self) -> None:
        """Raise the package's exception for what ``ncclCommGetAsyncError`` says."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """Call ``ncclCommAbort``; happens once at most."""

    @abc.abstractmethod
    def _destroy(self) -> None:
        """Call ``ncclCommDestroy``; happens once at most, and not after an abort."""


def check_place(size: int, unique_id: bytes, rank: int) -> None:
    """Check the arguments of :meth:`NcclBinding.init_rank`.

    Raises:
        ValueError: they are not what it takes.
    """
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(
            f"NCCL's unique id has {UNIQUE_ID_BYTES} bytes; got {len(unique_id)}"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}: expected 0 to {size - 1}")
