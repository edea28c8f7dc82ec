"""Telling the other ranks that this one leaves the program.

Without it they would wait in their next collective for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from communicators.agreement import Agreement

# Agreements whose ranks may still call collectives. Kept until finalize on purpose: a
# communicator that one rank's garbage collector took and another's did not would
# leave the ranks with different sets here.
_open: list[Agreement] = []
# What they use NCCL through, if they do.
_sessions: dict[Agreement, Any] = {}
_pid = 0

# Ranks that end together need not tell each other.
_ANNOUNCE_AFTER_S = 0.5
_LOOK_EVERY_S = 0.25


def enter(agreement: Agreement) -> None:
    """Note that the ranks of ``agreement`` must be told when this one leaves."""
    global _pid
    _pid = _pid or os.getpid()
    _open.append(agreement)


def has_entered() -> bool:
    """Tell whether ranks of this process have to be told when it leaves."""
    return _pid == os.getpid() and bool(_open)


def is_open(agreement: Agreement) -> bool:
    """Tell whether :func:`enter` has been called and not been taken back."""
    return agreement in _open


def close(agreement: Agreement) -> bool:
    """Take back :func:`enter`; tell whether there was anything to take back."""
    if agreement not in _open:
        return False
    _open.remove(agreement)
    _sessions.pop(agreement, None)
    return True


def attach(agreement: Agreement, session: Any) -> None:
    """Note the NCCL session of a communicator, to be taken down at the end."""
    _sessions[agreement] = session


def leave() -> None:
    """Meet the other ranks at the end of the program.

    Runs at exit, before MPI is finalised (which waits for all ranks too). A rank that
    leaves takes part in the agreements of all its communicators until the others
    leave as well, so each of their collectives fails at once with an error that says
    so.
    """
    # A process without communicators has no MPI; a forked child only looks as if.
    if _pid != os.getpid():
        return
    from communicators.transports.messages import abort, has_given_up, is_finalized
    from communicators.transports.waiting import Backoff

    if is_finalized():
        return
    for session in _sessions.values():
        try:
            # Others wait for what this rank still sends. Its watchdog has a time limit.
            session.synchronize()
        except Exception as error:
            # Also CUDA's own: the others must be met whatever happened here.
            sys.stderr.write(
                f"chainermn_ng: at exit: {type(error).__name__}: {error}\n"
            )
    waiting = {a: a.start_leaving() for a in _open if a.is_usable()}
    backoff = Backoff()
    next_look = _LOOK_EVERY_S
    has_announced = False
    while waiting:
        done = [a for a, (_, request) in waiting.items() if request.Test()]
        for agreement in done:
            result, _ = waiting.pop(agreement)
            if not agreement.finish_leaving(result):
                waiting[agreement] = agreement.start_leaving()
        if done:
            backoff, next_look = Backoff(), _LOOK_EVERY_S
        else:
            backoff.pause()
        if backoff.waited_s > next_look:
            # One that waits for a rank that never comes asks who is there.
            next_look = backoff.waited_s + _LOOK_EVERY_S
            waiting = {a: w for a, w in waiting.items() if a.is_usable()}
        if not has_announced and backoff.waited_s > _ANNOUNCE_AFTER_S:
            # The others are still at work: one may wait for a message from here.
            has_announced = True
            for agreement in waiting:
                agreement.announce_leaving()
    for session in _sessions.values():
        try:
            session.close(ranks_are_together=not has_given_up())
        except Exception as error:
            # The other sessions, and MPI, are to be closed all the same.
            sys.stderr.write(
                f"chainermn_ng: at exit: {type(error).__name__}: {error}\n"
            )
    if has_given_up():
        # MPI cannot be finalised while a collective that some rank never joined is
        # pending: without this the job would hang here.
        sys.stderr.write(
            "chainermn_ng: an operation was given up earlier, while others waited, so "
            "MPI cannot be finalised; ending the job\n"
        )
        sys.stderr.flush()
        abort(1)


atexit.register(leave)
