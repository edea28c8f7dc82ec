"""The ranks compare what they are about to do, before any of them does it.

MPI pairs collectives by their order, not by their meaning: a rank that skips a step or
holds another shape gives wrong numbers, a truncated message or a hang. Here each
collective begins with one all-reduce of a few words. When they differ, all ranks know
it at the same moment, exchange descriptions, and raise the same error.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from communicators.call_place import call_place
from communicators.difference_text import (
    Details,
    Report,
    difference_text,
    failure_text,
)
from communicators.errors import (
    CommunicationTimeoutError,
    CommunicatorError,
    MismatchError,
    RankFailedError,
    build_shared_error,
    shared_type_name,
    tell_on_one_rank,
)
from communicators.transports import load

if TYPE_CHECKING:
    from communicators.transports.messages import Messenger

_DIGEST_OF_NOTHING = hashlib.blake2b(b"", digest_size=16).digest()
#: Labels of the end: of one communicator by all ranks, of a rank's program.
FINALIZE = "finalize"
LEAVING = "leaving the program"


def digest_of(details: Details) -> bytes:
    """Return 16 bytes that tell ``details`` apart, the same on all ranks."""
    if not details:
        return _DIGEST_OF_NOTHING
    text = details if isinstance(details, str) else repr(list(details))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Agreement:
    """The agreement of one communicator's ranks on each of its collectives.

    Args:
        messenger: the control channel.
        is_debugging: compare the sequence numbers, too.

    Attributes:
        sequence (int): number of collectives begun; equal on all ranks.
        is_debugging (bool): see :mod:`communicators.debugging`; equal on all ranks.
    """

    def __init__(self, messenger: Messenger, is_debugging: bool = False) -> None:
        self._messenger = messenger
        self.is_debugging = is_debugging
        self.sequence = 0

    def check(
        self,
        label: str,
        details: Details = "",
        *,
        digest: bytes | None = None,
        error: BaseException | None = None,
        presence: Sequence[bool] | None = None,
        shown: Callable[[], str] | None = None,
    ) -> list[bool] | None:
        """Agree on one collective. All ranks call it, at the same point.

        Args:
            label: the operation.
            details: what must be equal on all ranks for this operation.
            digest: ``digest_of(details)`` if the caller has it.
            error: why this rank cannot take part; then all ranks raise.
            presence: which arrays this rank holds; may differ between ranks.
            shown: what else errors tell of this rank's call; may differ.

        Returns:
            The union of ``presence`` over all ranks, or ``None`` if not given.

        Raises:
            MismatchError: label or details differ; the same text on all ranks.
            TypeError, ValueError, OSError, CommunicatorError: some rank gave an
                ``error``; the same class and text on all ranks.
            CommunicationTimeoutError: some ranks did not come in time.
            RankFailedError: a rank stopped in the middle of an earlier collective.
        """
        if self._messenger.is_finalized:
            raise CommunicatorError(f"{label}: this communicator has been finalized")
        self.sequence += 1
        bits = b"" if presence is None else _packed(tuple(presence))
        self._messenger.raise_if_failed()
        if self._messenger.is_broken:
            raise CommunicatorError(
                f"{label}: this communicator is unusable after an earlier time-out, or "
                "an error in the middle of a collective"
            )
        name = label
        if self.is_debugging and label != FINALIZE:
            name = f"{label} #{self.sequence}"
        header = _header(name, digest or digest_of(details), bits, error is not None)
        result = self._messenger.bitwise_or(header, lambda: self._describe(label))
        difference = _difference(result)
        if difference & _CORE:
            self._raise_difference(label, details, error, shown)
        if presence is None:
            return None
        if not difference:
            return list(presence)
        return self._union(label, presence)

    def _describe(self, label: str) -> str:
        return f"{label} (collective {self.sequence})"

    def _union(self, label: str, presence: Sequence[bool]) -> list[bool]:
        bits = _packed(tuple(presence))
        bits += bytes(-len(bits) % 8)
        result = self._messenger.bitwise_or(bits, lambda: self._describe(label))
        flags = np.unpackbits(np.frombuffer(result, np.uint8), count=len(presence))
        return list(flags.astype(bool))

    def _raise_difference(
        self,
        label: str,
        details: Details,
        error: BaseException | None,
        shown: Callable[[], str] | None,
    ) -> None:
        failure = None
        if error is not None:
            failure = (shared_type_name(error), f"{type(error).__name__}: {error}")
        report = Report(
            self.sequence,
            label,
            details if isinstance(details, str) else list(details),
            failure,
            shown() if shown is not None and error is None else "",
            call_place(),
        )
        # As a plain tuple: what travels is the same in all versions.
        reports = [Report(*told) for told in self._messenger.share(tuple(report))]
        self.sequence = max(report.sequence for report in reports)
        rank, failed = self._messenger.rank, [r for r, x in enumerate(reports) if x[3]]
        here = [r for r, x in enumerate(reports) if x.label != LEAVING]
        shared: Exception
        if failed and len({report.label for report in reports}) == 1:
            type_name = reports[failed[0]].failure[0]  # type: ignore[index]
            shared = build_shared_error(type_name, failure_text(reports))
        else:
            shared = MismatchError(difference_text(reports))
        raise tell_on_one_rank(shared, rank == (failed or here)[0])

    # -- leaving ---

    def is_usable(self) -> bool:
        """Tell whether no rank has given up waiting on this communicator."""
        try:
            self._messenger.raise_if_asked(lambda: LEAVING)
        except (CommunicationTimeoutError, RankFailedError):
            # The others have raised it long ago; here the program ends anyway.
            return False
        return not self._messenger.is_broken

    def announce_leaving(self) -> None:
        """Tell ranks that wait for a message from this one that it leaves."""
        self._messenger.announce_leaving()

    def start_leaving(self) -> Any:
        """Begin the agreement on the end; return its result and MPI request."""
        header = _header(FINALIZE, digest_of(""), b"", False)
        return self._messenger.start_or(header, lambda: LEAVING)

    def finish_leaving(self, result: bytearray) -> bool:
        """Tell whether all ranks leave; if not, tell the others that this one does."""
        if not _difference(result) & _CORE:
            return True
        try:
            self._messenger.share(tuple(Report(self.sequence, LEAVING, "", None)))
        except (CommunicationTimeoutError, RankFailedError):
            # The others have given up just now: there is nobody left to tell.
            return True
        return False


_P = ParamSpec("_P")
_R = TypeVar("_R")


def guarded(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a collective give its communicator up where one rank alone fails in it.

    For methods of classes with a ``_messenger``; see :meth:`Messenger.guard`.
    """

    @functools.wraps(method)
    def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        collectives: Any = args[0]
        with collectives._messenger.guard():
            return method(*args, **kwargs)

    return inside


def meet_once(
    mpi_comm: Any, timeout_s: float | None, label: str, error: BaseException | None
) -> None:
    """Agree on ``label`` before there is a communicator to agree on. Collective.

    Args:
        mpi_comm: mpi4py communicator; ``None`` for MPI's world.
        timeout_s: limit of the wait, in seconds; ``None`` for none.
        label: must be equal on all ranks.
        error: raised on all ranks; as it is where it came up.

    Raises:
        UnavailableError: mpi4py cannot be imported.
        MismatchError, TypeError, ...: as in :meth:`Agreement.check`.
    """
    messages = load("messages")
    messenger = messages.Messenger(
        messages.world() if mpi_comm is None else mpi_comm, timeout_s
    )
    try:
        Agreement(messenger).check(label, error=error)
    finally:
        messenger.finalize()


# What is compared: digests of the label (8 bytes), the details (16) and the presence
# bits (8). It travels with its complement: the ORs of both share a bit where two ranks
# differ. Then 8 bytes of which one bit says that a rank has failed.
_N_COMPARED = 32
_COMPLEMENT = (1 << (8 * _N_COMPARED)) - 1
# All of that but the presence bits, which may differ: in little-endian numbers the
# last 8 bytes are the highest.
_CORE = (1 << (8 * (_N_COMPARED - 8))) - 1


# A training loop makes the same few calls at every step.
@functools.lru_cache(maxsize=64)
def _packed(flags: tuple[bool, ...]) -> bytes:
    return np.packbits(np.asarray(flags, bool)).tobytes()


@functools.lru_cache(maxsize=64)
def _header(label: str, digest: bytes, bits: bytes, failed: bool) -> bytes:
    head = hashlib.blake2b(label.encode(), digest_size=8).digest()
    tail = hashlib.blake2b(bits, digest_size=8).digest() if bits else bytes(8)
    compared = head + digest + tail
    complement = int.from_bytes(compared, "little") ^ _COMPLEMENT
    flag = b"\1" + bytes(7) if failed else bytes(8)
    return compared + complement.to_bytes(_N_COMPARED, "little") + flag


def _difference(result: bytearray) -> int:
    """Return non-zero if the ranks differ; bits below ``_CORE`` are grave."""
    if any(result[2 * _N_COMPARED :]):
        return _CORE
    ones = int.from_bytes(result[:_N_COMPARED], "little")
    zeros = int.from_bytes(result[_N_COMPARED : 2 * _N_COMPARED], "little")
    return ones & zeros
