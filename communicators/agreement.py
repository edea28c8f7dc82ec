"""The ranks compare what they are about to do, before any of them does it.

MPI pairs collectives by their order, not by their meaning: a rank that skips a step or
holds another shape gives wrong numbers, a truncated message or a hang. Here each
collective begins with one all-reduce of a few words. When they differ, all ranks know
it at the same moment, exchange descriptions, and raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.errors import (
    CommunicationTimeoutError,
    CommunicatorError,
    MismatchError,
    build_shared_error,
    shared_type_name,
)
from communicators.transports import load

if TYPE_CHECKING:
    from communicators.transports.messages import Messenger

#: What a collective works on: a text, or ``(name, description)`` of each array.
Details = str | Sequence[tuple[str, str]]

_MAX_DIFFERENCES = 5
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

    Attributes:
        sequence (int): number of collectives begun; equal on all ranks.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.sequence = 0

    def check(
        self,
        label: str,
        details: Details = "",
        *,
        digest: bytes | None = None,
        error: BaseException | None = None,
        presence: Sequence[bool] | None = None,
    ) -> list[bool] | None:
        """Agree on one collective. All ranks call it, at the same point.

        Args:
            label: the operation.
            details: what must be equal on all ranks for this operation.
            digest: ``digest_of(details)`` if the caller has it.
            error: why this rank cannot take part; then all ranks raise.
            presence: which arrays this rank holds; may differ between ranks.

        Returns:
            The union of ``presence`` over all ranks, or ``None`` if not given.

        Raises:
            MismatchError: label or details differ; the same text on all ranks.
            TypeError, ValueError, OSError, CommunicatorError: some rank gave an
                ``error``; the same class and text on all ranks.
            CommunicationTimeoutError: some ranks did not come in time.
        """
        if self._messenger.is_finalized:
            raise CommunicatorError(f"{label}: this communicator has been finalized")
        self.sequence += 1
        bits = b"" if presence is None else _packed(presence)
        self._messenger.raise_if_failed()
        if self._messenger.is_broken:
            raise CommunicatorError(
                f"{label}: this communicator is unusable after an earlier time-out"
            )
        header = _header(label, digest or digest_of(details), bits, error is not None)
        result = self._messenger.bitwise_or(header, lambda: self._describe(label))
        difference = _difference(result)
        if difference & _CORE:
            self._raise_difference(label, details, error)
        if presence is None:
            return None
        if not difference:
            return list(presence)
        return self._union(label, presence)

    def _describe(self, label: str) -> str:
        return f"{label} (collective {self.sequence})"

    def _union(self, label: str, presence: Sequence[bool]) -> list[bool]:
        bits = _packed(presence)
        bits += bytes(-len(bits) % 8)
        result = self._messenger.bitwise_or(bits, lambda: self._describe(label))
        flags = np.unpackbits(np.frombuffer(result, np.uint8), count=len(presence))
        return list(flags.astype(bool))

    def _raise_difference(
        self, label: str, details: Details, error: BaseException | None
    ) -> None:
        failure = None
        if error is not None:
            failure = (shared_type_name(error), f"{type(error).__name__}: {error}")
        kept = details if isinstance(details, str) else list(details)
        reports = self._messenger.share((self.sequence, label, kept, failure))
        self.sequence = max(report[0] for report in reports)
        labels = [report[1] for report in reports]
        failures = {r: report[3] for r, report in enumerate(reports) if report[3]}
        if failures and len(set(labels)) == 1:
            type_name = next(iter(failures.values()))[0]
            raise build_shared_error(type_name, _failure_text(label, failures))
        raise MismatchError(
            f"collective {self.sequence}: "
            + _difference_text(labels, [report[2] for report in reports], failures)
        )

    # -- leaving ---

    def is_usable(self) -> bool:
        """Tell whether no rank has given up waiting on this communicator."""
        try:
            self._messenger.raise_if_asked(lambda: LEAVING)
        except CommunicationTimeoutError:
            # The others have raised it long ago; here the program ends anyway.
            return False
        return not self._messenger.is_broken

    def announce_leaving(self) -> None:
        """Tell ranks that wait for a message from this one that it leaves."""
        self._messenger.announce_leaving()

    def start_leaving(self) -> Any:
        """Begin the agreement on the end; return its result and MPI request."""
        return self._messenger.start_or(_header(FINALIZE, digest_of(""), b"", False))

    def finish_leaving(self, result: bytearray) -> bool:
        """Tell whether all ranks leave; if not, tell the others that this one does."""
        if not _difference(result) & _CORE:
            return True
        self._messenger.share((self.sequence, LEAVING, "", None))
        return False


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


def _packed(flags: Sequence[bool]) -> bytes:
    return np.packbits(np.asarray(flags, bool)).tobytes()


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


def _by_text(texts: Iterable[tuple[int, str]]) -> list[tuple[str, str]]:
    """Group ``(rank, text)`` by text; return pairs of text and its ranks in words."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return [(text, _ranks(ranks)) for text, ranks in groups.items()]


def _failure_text(label: str, failures: dict[int, tuple[str, str]]) -> str:
    texts = _by_text((rank, text) for rank, (_, text) in failures.items())
    return f"{label} failed on " + "; on ".join(f"{who}: {text}" for text, who in texts)


def _difference_text(
    labels: list[str],
    details: list[Details],
    failures: dict[int, tuple[str, str]],
) -> str:
    if len(set(labels)) > 1:
        parts = [f"{who}: {label}" for label, who in _by_text(enumerate(labels))]
        text = "the ranks are in different operations: " + "; ".join(parts)
        for rank, (_, why) in failures.items():
            text += f"; rank {rank} failed with {why}"
        return text
    if all(not isinstance(item, str) for item in details):
        return f"{labels[0]}: the ranks hold different arrays: " + _array_differences(
            [dict(item) for item in details]  # type: ignore[arg-type]
        )
    texts = _by_text((rank, str(item)) for rank, item in enumerate(details))
    parts = [f"{text} on {who}" for text, who in texts]
    return f"{labels[0]}: the ranks gave different arguments: " + "; ".join(parts)


def _array_differences(tables: list[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for table in tables for name in table))
    differences = []
    for name in names:
        found = enumerate(table.get(name, "absent") for table in tables)
        texts = _by_text(found)
        if len(texts) > 1:
            parts = [f"{text} on {who}" for text, who in texts]
            differences.append(f"{name}: " + ", ".join(parts))
    if not differences:
        return "the same ones in another order"
    more = len(differences) - _MAX_DIFFERENCES
    text = "; ".join(differences[:_MAX_DIFFERENCES])
    return f"{text}; and {more} more" if more > 0 else text


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ...)"
    return "ranks " + ", ".join(map(str, ranks))
