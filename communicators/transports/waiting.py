"""Waiting for MPI requests without holding the core, and not for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from communicators.errors import CommunicationTimeoutError

# A request between ranks of one host often completes within microseconds, so it is
# first polled. With more ranks than cores the peer cannot run while we poll, so the
# core is then offered, and after some milliseconds (the peer computes, or loads
# data) given away for longer and longer.
_POLLS = 50
_YIELD_UNTIL_S = 0.005
_SHORT_SLEEP_S = 50e-6
_LONG_SLEEP_S = 1e-3
_LONG_AFTER_S = 1.0

#: How often a rank that waits looks whether another one asks where it is.
LISTEN_EVERY_S = 0.25


class Backoff:
    """One wait: call :meth:`pause` each time that nothing was ready."""

    def __init__(self) -> None:
        self._polls = 0
        self._start = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since polling gave way to waiting."""
        return time.monotonic() - self._start if self._start else 0.0

    def pause(self) -> None:
        """Poll again at once, yield the core, or sleep, by how long it has taken."""
        self._polls += 1
        if self._polls <= _POLLS:
            return
        if not self._start:
            self._start = time.monotonic()
        waited = time.monotonic() - self._start
        if waited < _YIELD_UNTIL_S:
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
        else:
            time.sleep(_SHORT_SLEEP_S if waited < _LONG_AFTER_S else _LONG_SLEEP_S)


def wait_all(
    requests: Sequence[Any],
    timeout_s: float | None,
    describe: Callable[[], str],
    listen: Callable[[], None] | None = None,
) -> None:
    """Wait until all MPI requests are complete.

    Args:
        requests: mpi4py requests.
        timeout_s: limit in seconds, or ``None`` for no limit.
        describe: called for the error's text.
        listen: called now and then; may raise what other ranks have to say.

    Raises:
        CommunicationTimeoutError: not complete in time.
    """
    backoff = Backoff()
    next_listen = LISTEN_EVERY_S
    pending = list(requests)
    while pending:
        pending = [request for request in pending if not request.Test()]
        if pending:
            backoff.pause()
            if listen is not None and backoff.waited_s > next_listen:
                next_listen = backoff.waited_s + LISTEN_EVERY_S
                listen()
            if timeout_s is not None and backoff.waited_s > timeout_s:
                raise CommunicationTimeoutError(
                    f"{describe()}: not complete after {timeout_s:g} s"
                )
