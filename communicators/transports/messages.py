"""Bytes and small objects between the ranks of a communicator.

What array and object collectives stand on, and the control channel over which the
ranks agree. After an agreement all ranks are inside the same call, so blocking MPI
calls are safe; whatever may wait for a rank that never comes has a time limit.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from communicators.call_place import call_place
from communicators.dtypes import Array
from communicators.errors import (
    CommunicationTimeoutError,
    CommunicatorError,
    RankFailedError,
    is_raised_by_all,
    tell_on_one_rank,
)
from communicators.transports.mpi import post_recv, post_send
from communicators.transports.waiting import LISTEN_EVERY_S, Backoff, wait_all

ANY_SOURCE: int = MPI.ANY_SOURCE
ANY_TAG: int = MPI.ANY_TAG
IN_PLACE: Any = MPI.IN_PLACE

# Tags on the control communicator: a rank that has waited too long asks the others
# where they are, those that wait as well answer, and hear who is missing. One that
# does not go on says so where the others listen for such questions.
_ASK_TAG = 1
_ANSWER_TAG = 2
_VERDICT_TAG = 3
_LEAVE_TAG = 4
_ANSWER_WAIT_S = 2.0


class Stopped(NamedTuple):
    """What a rank tells the others when it does not go on with a collective."""

    text: str


def world() -> Any:
    """Return MPI's world communicator, initialising MPI."""
    return MPI.COMM_WORLD


def library_version() -> str:
    """Return the first line that the MPI library says of itself."""
    return MPI.Get_library_version().splitlines()[0].strip("\0 ")


def thread_level() -> str:
    """Return what MPI lets threads do: ``"multiple"`` if several may call at once."""
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return levels[MPI.Query_thread()]


def is_undefined(color: int | None) -> bool:
    """Tell whether a colour of ``split`` means "in no group"."""
    return color is None or color == MPI.UNDEFINED


def split_mpi(mpi_comm: Any, color: int | None, key: int) -> Any | None:
    """Split an mpi4py communicator; ``None`` for ranks with the undefined colour."""
    part = mpi_comm.Split(MPI.UNDEFINED if color is None else color, key)
    return None if part == MPI.COMM_NULL else part


def shared_memory_hosts(mpi_comm: Any) -> list[int]:
    """Return, for each rank, the lowest rank that shares memory with it. Collective.

    Host names do not decide: containers of one machine may share a name, or one
    machine's containers may have several.
    """
    host = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, key=mpi_comm.Get_rank())
    first = host.bcast(mpi_comm.Get_rank(), root=0)
    host.Free()
    return list(mpi_comm.allgather(first))


def world_ranks(mpi_comm: Any) -> list[int]:
    """Return each member's rank in MPI's world. Collective."""
    return list(mpi_comm.allgather(MPI.COMM_WORLD.Get_rank()))


def _nothing() -> None:
    pass


def _create() -> str:
    return "create_communicator"


class Messenger:
    """Messages on two private MPI communicators: one for control, one for data.

    Args:
        mpi_comm: mpi4py communicator; duplicated. Collective.
        timeout_s: limit of every wait for a rank that may never come, in seconds;
            ``None`` for none.

    Raises:
        CommunicationTimeoutError: some ranks make none within ``timeout_s``.
    """

    def __init__(self, mpi_comm: Any, timeout_s: float | None) -> None:
        if not isinstance(mpi_comm, MPI.Intracomm) or mpi_comm == MPI.COMM_NULL:
            raise TypeError(
                f"mpi_comm: expected an mpi4py intracommunicator; got {mpi_comm!r}"
            )
        self.timeout_s = timeout_s
        self._control: Any
        self._data: Any
        # One after the other: on Open MPI two at once may wait for each other for ever,
        # if the ranks have used up different context numbers (open-mpi/ompi#2025).
        self._control = self._duplicate(mpi_comm)
        self._data = self._duplicate(mpi_comm)
        self.rank: int = mpi_comm.Get_rank()
        self.size: int = mpi_comm.Get_size()
        self.sent_bytes = 0
        self.is_broken = False
        self._has_told = False
        #: Raises what a thread that watches other operations has found.
        self.raise_if_failed: Callable[[], None] = _nothing
        #: Names the collective that the ranks are in.
        self.describe: Callable[[], str] = _create
        #: Of the communicator for which this one works, and which names what it does.
        self.leader: Messenger | None = None
        self._keep_alive: list[Any] = []
        self._farewells: list[Any] = []

    def _duplicate(self, mpi_comm: Any) -> Any:
        duplicate, request = mpi_comm.Idup()
        try:
            wait_all([request], self.timeout_s, lambda: "create_communicator")
        except CommunicationTimeoutError as error:
            _given_up.append(self)
            raise CommunicationTimeoutError(
                f"{error}: some ranks did not call it"
            ) from None
        return duplicate

    @property
    def is_finalized(self) -> bool:
        """Whether :meth:`finalize` has been called."""
        return self._control is None

    def finalize(self) -> None:
        """Free the MPI communicators. Collective; safe to call twice."""
        if self._control is not None and not self.is_broken:
            self._control.Free()
            self._data.Free()
        self._control = self._data = None

    # -- control ---

    def start_or(
        self, bits: bytes, describe: Callable[[], str]
    ) -> tuple[bytearray, Any]:
        """Begin the bit-wise OR of ``bits`` over all ranks; return result, request.

        Args:
            bits: a multiple of 8 bytes, the same number on all ranks.
            describe: names what begins with it, for the errors of later waits.
        """
        self.describe = describe
        result = bytearray(len(bits))
        request = self._control.Iallreduce(
            [bits, MPI.UINT64_T], [result, MPI.UINT64_T], MPI.BOR
        )
        # The library reads ``bits`` until the request completes.
        self._keep_alive = [bits, result, request]
        return result, request

    def bitwise_or(self, bits: bytes, describe: Callable[[], str]) -> bytearray:
        """Return the bit-wise OR of ``bits`` over all ranks (see :meth:`start_or`).

        Raises:
            CommunicationTimeoutError: some ranks did not come within ``timeout_s``;
                the text names them. Raised on every rank that waits.
            RankFailedError: a rank does not go on with this collective, or the last.
        """
        result, request = self.start_or(bits, describe)
        backoff = Backoff()
        next_listen = LISTEN_EVERY_S
        while not request.Test():
            backoff.pause()
            waited = backoff.waited_s
            if waited < next_listen:
                continue
            next_listen = waited + LISTEN_EVERY_S
            self.raise_if_failed()
            self.raise_if_asked(describe)
            if self.timeout_s is not None and waited > self.timeout_s:
                self._raise_missing(describe(), waited, "did not come")
        # For a rank that comes late everything is complete at once, although the
        # others have given it up.
        self.raise_if_asked(describe)
        return result

    def give_up(self, error: BaseException | None = None) -> None:
        """Note that a wait was given up: messages are pending that nobody awaits.

        Args:
            error: of this rank alone, for which it does not go on with the collective
                that the ranks have agreed on. Those that wait for it are told.
        """
        if not self.is_broken:
            self.is_broken = True
            _given_up.append(self)
        if error is None or self._has_told or is_raised_by_all(error):
            return
        self._has_told = True
        text = (
            f"{self._operation()}: rank {self.rank} stopped in the middle of it: "
            f"{type(error).__name__}: {_text_of(error)}{_called_from()}"
        )
        # Where MPI itself has failed nobody can be told.
        with contextlib.suppress(MPI.Exception):
            for rank in self._others():
                request = self._control.isend(Stopped(text), rank, _ASK_TAG)
                self._keep_alive.append(request)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Give up if this rank alone fails in what is inside, a part of a collective.

        The others wait for it, and what has been sent already would be taken for a
        part of the next collective.
        """
        try:
            yield
        except BaseException as error:
            is_alone = not is_raised_by_all(error) and self.size > 1
            if is_alone and not self.is_finalized:
                self.give_up(error)
            raise

    def raise_if_asked(self, describe: Callable[[], str]) -> None:
        """Raise if another rank has given up waiting; tell it that this one lives.

        Raises:
            CommunicationTimeoutError: another rank's wait took longer than its limit.
            RankFailedError: another rank does not go on.
        """
        # MPICH looks first and then makes progress, so a message that lies there
        # already is found at the second look.
        probe = self._control.Iprobe
        if not (probe(MPI.ANY_SOURCE, _ASK_TAG) or probe(MPI.ANY_SOURCE, _ASK_TAG)):
            return
        status = MPI.Status()
        self._control.Probe(MPI.ANY_SOURCE, _ASK_TAG, status)
        asker = status.Get_source()
        question = self._control.recv(source=asker, tag=_ASK_TAG)
        self.give_up()
        if isinstance(question, Stopped):
            raise tell_on_one_rank(RankFailedError(question.text), False)
        answer = self._control.isend(_waiting_in(describe), asker, _ANSWER_TAG)
        self._keep_alive.append(answer)
        # The asker's text names the ranks that are missing; all raise the same.
        verdict = self._control.irecv(source=asker, tag=_VERDICT_TAG)
        end = time.monotonic() + 2 * _ANSWER_WAIT_S
        while time.monotonic() < end:
            done, text = verdict.test()
            if done:
                raise tell_on_one_rank(CommunicationTimeoutError(text), False)
            time.sleep(0.001)
        self._keep_alive.append(verdict)
        raise CommunicationTimeoutError(f"{describe()}: rank {asker} gave up waiting")

    def raise_stopped(self, text: str, waited_s: float) -> NoReturn:
        """Give up an operation that all ranks have begun; name those that stopped.

        Args:
            text: the operation.
            waited_s: how long nothing has moved, in seconds.

        Raises:
            CommunicationTimeoutError: always, also on the other ranks that wait.
        """
        operation = self._operation()
        if text != operation:
            operation = f"{operation}, {text}"
        what = "stopped in the middle of it: nothing came"
        self._raise_missing(operation, waited_s, what)

    def _raise_missing(self, text: str, waited_s: float, what: str) -> NoReturn:
        self.give_up()
        waiting = {self.rank: _waiting_in(lambda: text)}
        for rank in self._others():
            request = self._control.isend(waiting[self.rank], rank, _ASK_TAG)
            self._keep_alive.append(request)
        answered: set[int] = set()
        stopped: dict[int, str] = {}
        end = time.monotonic() + _ANSWER_WAIT_S
        while time.monotonic() < end and len(waiting) + len(stopped) < self.size:
            # A rank that asks itself at this moment waits too.
            for tag in (_ANSWER_TAG, _ASK_TAG):
                status = MPI.Status()
                if self._control.Iprobe(MPI.ANY_SOURCE, tag, status):
                    rank = status.Get_source()
                    told = self._control.recv(source=rank, tag=tag)
                    if isinstance(told, Stopped):
                        stopped[rank] = told.text
                        continue
                    waiting[rank] = told
                    if tag == _ANSWER_TAG:
                        answered.add(rank)
            time.sleep(0.001)
        who = _missing_text(waiting, self.size, what)
        verdict = (
            f"{text}: {who} within {waited_s:.0f} s (timeout_s={self.timeout_s:g}); "
            f"{'; '.join([_waiting_text(waiting), *stopped.values()])}"
        )
        # Those that come later than this find it waiting.
        requests = {
            rank: self._control.isend(verdict, rank, _VERDICT_TAG)
            for rank in range(self.size)
            if rank not in waiting or rank in answered
        }
        self._keep_alive += requests.values()
        wait_all([requests[r] for r in answered], _ANSWER_WAIT_S, lambda: verdict)
        raise CommunicationTimeoutError(verdict)

    def announce_leaving(self) -> None:
        """Tell all ranks that this one sends and receives no more messages."""
        for rank in self._others():
            request = self._control.isend(None, rank, _LEAVE_TAG)
            self._farewells.append(request)

    def _operation(self) -> str:
        return (self.leader or self).describe()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _has_left(self, rank: int) -> bool:
        return rank != MPI.ANY_SOURCE and bool(self._control.Iprobe(rank, _LEAVE_TAG))

    def share(self, value: Any) -> list[Any]:
        """Give every rank the small values of all ranks, in rank order. Collective.

        Raises:
            CommunicationTimeoutError: a rank stopped in the middle.
            RankFailedError: a rank failed in the middle.
        """
        packed = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        own = np.array([packed.size], np.int64)
        self._finish(self._control.Iallgather(own, sizes))
        parts = np.empty(sizes.sum(), np.uint8)
        into = [parts, sizes.tolist(), MPI.BYTE]
        self._finish(self._control.Iallgatherv([packed, MPI.BYTE], into))
        ends = np.cumsum(sizes)
        return [
            pickle.loads(parts[end - n : end].data)
            for n, end in zip(sizes, ends, strict=True)
        ]

    def share_from(self, value: Any, root: int) -> Any:
        """Give every rank the small value of ``root``. Collective. As :meth:`share`."""
        packed = np.frombuffer(pickle.dumps(value), np.uint8)
        n_bytes = np.array([packed.size], np.int64)
        self._finish(self._control.Ibcast(n_bytes, root=root))
        if self.rank != root:
            packed = np.empty(n_bytes[0], np.uint8)
        self._finish(self._control.Ibcast([packed, MPI.BYTE], root=root))
        return value if self.rank == root else pickle.loads(packed.data)

    def _finish(self, request: Any) -> None:
        """Wait for an MPI collective that the ranks have agreed on."""
        self._wait([request], self.describe, is_collective=True)

    # -- bytes ---

    def broadcast(self, data: Array, root: int, max_bytes: int | None = None) -> None:
        """Copy root's bytes into ``data`` (uint8, contiguous) on every rank."""
        step = max_bytes or (1 << 28)
        for at in range(0, data.size, step):
            part = [data[at : at + step], MPI.BYTE]
            self._finish(self._data.Ibcast(part, root=root))
        if self.rank == root:
            self.sent_bytes += data.size * (self.size - 1)

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Array]],
        incoming: Sequence[tuple[int, Array]],
        label: str,
    ) -> None:
        """Send and receive bytes with any ranks at once, inside of a collective.

        Args:
            outgoing: ``(dest, uint8 array)`` pairs; those for this rank are copied.
            incoming: ``(source, uint8 array)`` pairs, in the order of sending.
            label: operation, for errors.

        Raises:
            CommunicationTimeoutError: a peer stopped in the middle.
            RankFailedError: a rank failed in the middle.
        """
        requests = []
        own = [data for dest, data in outgoing if dest == self.rank]
        for source, data in incoming:
            if source == self.rank:
                data[:] = own.pop(0)
            else:
                requests += post_recv(self._data, data, source, 0)
        for dest, data in outgoing:
            if dest != self.rank:
                self.sent_bytes += data.size
                requests += post_send(self._data, data, dest, 0)
        self._wait(requests, lambda: label, is_collective=True)

    # -- point to point ---

    def send(self, header: Any, parts: Sequence[Array], dest: int, tag: int) -> None:
        """Send a small header, then byte arrays whose sizes follow from it.

        Raises:
            CommunicationTimeoutError: the receiver did not come.
        """

        def describe() -> str:
            return f"send from rank {self.rank} to rank {dest} (tag {tag})"

        packed = np.frombuffer(pickle.dumps(header), np.uint8)
        requests = [self._data.Isend([packed, MPI.BYTE], dest, 2 * tag + 1)]
        for data in parts:
            self.sent_bytes += data.size
            requests += post_send(self._data, data, dest, 2 * tag + 2)
        self._wait(requests, describe)

    def receive(
        self, source: int, tag: int, allocate: Callable[[Any], list[Array]]
    ) -> tuple[Any, int, int]:
        """Receive a header, then the byte arrays that ``allocate(header)`` makes.

        Args:
            source: a rank, or ``ANY_SOURCE``.
            tag: 0 or more, or ``ANY_TAG``.

        Returns:
            The header, the sender's rank and its tag; the bytes are in the arrays.

        Raises:
            CommunicationTimeoutError: nothing came within ``timeout_s``.
            CommunicatorError: the sender has left the program.
            RankFailedError: a rank has failed in a collective.
        """
        whom = "any rank" if source == MPI.ANY_SOURCE else f"rank {source}"

        def describe() -> str:
            return f"recv on rank {self.rank} from {whom} (tag {tag})"

        status = MPI.Status()
        backoff = Backoff()
        next_listen = LISTEN_EVERY_S
        # Every message of ours is a header and then its data, in this order, and both
        # are taken by one call: the first message with any tag is a header.
        wanted = MPI.ANY_TAG if tag == MPI.ANY_TAG else 2 * tag + 1
        message = self._data.Improbe(source, wanted, status)
        while message is None:
            backoff.pause()
            if backoff.waited_s > next_listen:
                next_listen = backoff.waited_s + LISTEN_EVERY_S
                self.raise_if_asked(describe)
                if self._has_left(source):
                    # What it sent before may have come only now.
                    message = self._data.Improbe(source, wanted, status)
                    if message is not None:
                        break
                    raise CommunicatorError(
                        f"{describe()}: rank {source} has left the program"
                    )
            if self.timeout_s is not None and backoff.waited_s > self.timeout_s:
                raise CommunicationTimeoutError(
                    f"{describe()}: nothing came within {self.timeout_s:g} s"
                    + _called_from()
                )
            message = self._data.Improbe(source, wanted, status)
        packed = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        message.Recv([packed, MPI.BYTE])
        header = pickle.loads(packed.tobytes())
        sender, sent_tag = status.Get_source(), (status.Get_tag() - 1) // 2
        requests = []
        # The data would be taken for those of the next message.
        with self.guard():
            for data in allocate(header):
                requests += post_recv(self._data, data, sender, 2 * sent_tag + 2)
        self._wait(requests, describe)
        return header, sender, sent_tag

    def _wait(
        self,
        requests: Sequence[Any],
        describe: Callable[[], str],
        *,
        is_collective: bool = False,
    ) -> None:
        try:
            wait_all(
                requests,
                self.timeout_s,
                describe,
                lambda: self.raise_if_asked(describe),
            )
        except CommunicationTimeoutError as error:
            self._keep_alive += requests
            if self.is_broken:
                raise  # what another rank has to say
            self.give_up()
            if is_collective:
                assert self.timeout_s is not None
                self.raise_stopped(describe(), self.timeout_s)
            raise CommunicationTimeoutError(f"{error}{_called_from()}") from None


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a class of the user's
        return "(an error without a text)"


def _called_from() -> str:
    place = call_place()
    return f"; called from {place}" if place else ""


def _waiting_in(describe: Callable[[], str]) -> str:
    """Return what a rank waits for, and the line of the program that called it."""
    place = call_place()
    return f"{describe()} at {place}" if place else describe()


def _missing_text(waiting: Iterable[int], size: int, what: str) -> str:
    missing = sorted(set(range(size)) - set(waiting))
    if missing:
        return f"ranks {missing} of {size} {what}"
    return "all ranks wait, but not for the same operation,"


def _waiting_text(waiting: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank in sorted(waiting):
        groups.setdefault(waiting[rank], []).append(rank)
    parts = [f"ranks {ranks} in {text}" for text, ranks in groups.items()]
    return "waiting: " + "; ".join(parts)


# Communicators on which a rank gave up waiting: their pending collectives keep MPI
# from being finalised.
_given_up: list[Messenger] = []


def has_given_up() -> bool:
    """Tell whether a wait on any communicator of this process was given up."""
    return bool(_given_up)


def abort(status: int) -> None:
    """End all ranks of the job."""
    # MPICH's mpiexec kills the ranks before it has read what they wrote last.
    time.sleep(0.5)
    MPI.COMM_WORLD.Abort(status)


def is_finalized() -> bool:
    """Tell whether MPI has been finalised (or never initialised) in this process."""
    return bool(MPI.Is_finalized()) or not MPI.Is_initialized()
