"""Waiting for MPI requests without holding the core, and not for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from communicators.errors import CommunicationTimeoutError

# A request between ranks of one host often completes within microseconds, so it is
# first polled. With more ranks than cores the peer cannot run while we poll, so the
# core is then offered, and after some milliseconds (the peer computes, or loads
# data) given away for longer and longer.
_POLLS = 3
_YIELD_UNTIL_S = 0.005
_SHORT_SLEEP_S = 50e-6
_LONG_SLEEP_S = 1e-3
_LONG_AFTER_S = 1.0
# In a thread beside one that computes, polling takes the core, and Python's lock, from
# what it is to hide behind. Meanwhile the network fills the buffers of the sockets,
# which hold more than comes in such a time.
_BACKGROUND_POLLS = 2
_BACKGROUND_SLEEP_S = 200e-6

#: How often a rank that waits looks whether another one asks where it is.
LISTEN_EVERY_S = 0.25


class Backoff:
    """One wait: call :meth:`pause` each time that nothing was ready."""

    def __init__(self) -> None:
        self._polls = 0
        self._start = 0.0
        is_background = threading.current_thread() is not threading.main_thread()
        self._most_polls = _BACKGROUND_POLLS if is_background else _POLLS
        self._yield_until_s = 0.0 if is_background else _YIELD_UNTIL_S
        self._short_sleep_s = _BACKGROUND_SLEEP_S if is_background else _SHORT_SLEEP_S

    @property
    def waited_s(self) -> float:
        """Seconds since polling gave way to waiting."""
        return time.monotonic() - self._start if self._start else 0.0

    def pause(self) -> None:
        """Poll again at once, yield the core, or sleep, by how long it has taken."""
        self._polls += 1
        if self._polls <= self._most_polls:
            return
        if not self._start:
            self._start = time.monotonic()
        waited = time.monotonic() - self._start
        if waited < self._yield_until_s:
            os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
        else:
            is_short = waited < _LONG_AFTER_S
            time.sleep(self._short_sleep_s if is_short else _LONG_SLEEP_S)


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
