"""The watchdog's thread: it ends the job whatever NCCL does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from communicators import CommunicationTimeoutError, NcclError
from communicators.transports import nccl_watchdog
from communicators.transports.nccl_watchdog import Watchdog


class Watched:
    """A watchdog over operations that tests make up.

    Attributes:
        ended: set when the job would end.
        given_up: set when the communicator is given up.
    """

    def __init__(
        self,
        aborts: Sequence[Callable[[], None]] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.ended, self.given_up = threading.Event(), threading.Event()
        self.done: set[object] = set()
        self.dog = Watchdog(
            0.5,
            is_done=lambda event: event in self.done,
            check=check,
            give_up=self.given_up.set,
            aborts=lambda: aborts,
            end_job=self.ended.set,
        )


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the grace be short."""
    monkeypatch.setattr(nccl_watchdog, "ABORT_S", 0.3)
    monkeypatch.setattr(nccl_watchdog, "GRACE_S", 0.5)


def hang() -> None:
    threading.Event().wait(30)


def refuse() -> None:
    raise NcclError("ncclCommAbort", 3, "internal error")


@pytest.mark.parametrize("abort", [hang, refuse])
def test_an_abort_that_hangs_or_fails_does_not_keep_the_job(abort, capfd):
    others = []
    watched = Watched([abort, lambda: others.append("aborted"), abort])
    watched.dog.begin("flat: all-reduce of 3 float32")
    assert watched.ended.wait(10)
    assert watched.given_up.is_set()
    assert others == ["aborted"]
    assert "flat: all-reduce of 3 float32: not complete after" in capfd.readouterr().err
    with pytest.raises(CommunicationTimeoutError, match=r"timeout_s=0\.5"):
        watched.dog.raise_if_failed()


def test_a_program_that_raises_by_itself_is_left_alone():
    watched = Watched()
    watched.dog.begin("one")
    assert watched.given_up.wait(10)
    with pytest.raises(CommunicationTimeoutError, match="one: not complete"):
        watched.dog.raise_if_failed()
    assert not watched.ended.wait(1.5)


def test_operations_that_end_in_time_are_forgotten():
    watched = Watched()
    for i in range(20):
        operation = watched.dog.begin(f"operation {i}")
        watched.dog.submitted(operation, i)
        watched.done.add(i)
        time.sleep(0.05)
    watched.dog.raise_if_failed()
    assert not watched.given_up.is_set()
    watched.dog.stop()


def test_a_device_that_fails_when_it_is_asked_ends_the_job(capfd):
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    watched = Watched(check=fail)
    assert watched.ended.wait(10)
    assert "illegal memory access" in capfd.readouterr().err
