"""A rank that ends by ``sys.exit(3)`` or ``os._exit`` does not leave the others alone.

Python calls no hook for ``SystemExit``, and tells its ``atexit`` functions no status.
What is known: an exception that nobody catches is thrown away when no line of Python
runs any more, one that is caught while some line does. So ``sys.exit`` raises an object
that notices how it ends.

``os._exit`` skips everything that would tell the other ranks. MPICH's mpiexec then
kills them without a word, and reports the status of the one that left, which may be 0.
Here a status other than 0 ends the job with a message. With 0 the rank first leaves as
at the end of a program: the others get an error that says so if they still work, and
the job ends in peace if they do not.

Noticed under ``python -m chainermn_ng`` only: ``raise SystemExit(3)``, ``quit(3)`` and
``exit(3)``, which raise one of their own, ``sys.exit`` imported by name before this
package, and an exception to which the program keeps a reference (``except SystemExit
as e: kept = e; raise``), as it outlives the exit. Never noticed: exits of C libraries.
The other ranks then see at their next collective that the rank has left.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from chainermn_ng import job_control

_previous_exit: Callable[..., NoReturn] = sys.exit
_previous_os_exit: Callable[[int], NoReturn] = os._exit
_is_enabled: list[Callable[[], bool]] = []
# Objects that are dropped from now on belonged to modules, not to an exit.
_is_ending = False


class _Exit(SystemExit):
    """What ``sys.exit`` raises; weak references to it can be made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


# For whoever prints it.
_Exit.__name__ = _Exit.__qualname__ = "SystemExit"
_Exit.__module__ = "builtins"


def status_of(code: Any) -> int:
    """Return the status with which Python leaves for an argument of ``sys.exit``."""
    if code is None:
        return 0
    if isinstance(code, int):
        # The operating system keeps 8 bits; a failure must not become 0 by that.
        return (code & 0xFF or 1) if code else 0
    return 1


def text_of(code: Any) -> str:
    """Return what was called, for the message of the job's end."""
    # With the text: Python prints it only after the exception has been thrown away.
    return f"sys.exit({code!r})"


def _exit(status: Any = None, /) -> NoReturn:
    """Leave the program as ``sys.exit`` does."""
    is_main = threading.current_thread() is threading.main_thread()
    if not status_of(status) or not is_main:
        # Of a thread it is the end, and no failure of the program.
        raise SystemExit(status)
    error = _Exit(status)
    _watch(error, status_of(status), text_of(status))
    try:
        raise error
    finally:
        # Its traceback holds this frame, which must not hold it: see the module.
        del error


_watched: set[weakref.ref[Any]] = set()


def _watch(error: _Exit, status: int, text: str) -> None:
    def dropped(reference: weakref.ref[Any]) -> None:
        _watched.discard(reference)
        is_caught = sys._getframe(0).f_back is not None
        if not is_caught and not _is_ending and _acts():
            job_control.end_job(status, text)

    _watched.add(weakref.ref(error, dropped))


def _os_exit(status: int) -> NoReturn:
    """Leave as ``os._exit`` does, with a word to the other ranks."""
    if job_control.is_rank_process() and job_control.is_in_mpi() and _acts():
        if status & 0xFF:
            job_control.end_job(status & 0xFF, f"os._exit({status})")
        else:
            job_control.flush_output()
            job_control.leave_job()
    _previous_os_exit(status)


def _acts() -> bool:
    return all(is_enabled() for is_enabled in _is_enabled)


def _note_end() -> None:
    global _is_ending
    _is_ending = True


def add_hooks(enabled: Callable[[], bool]) -> None:
    """Replace ``sys.exit`` and ``os._exit``, once, in jobs of more than one rank.

    Args:
        enabled: asked at the exit whether the job is to be ended.
    """
    global _previous_exit, _previous_os_exit
    if sys.exit is _exit or job_control.rank_and_size()[1] < 2:
        return
    _is_enabled[:] = [enabled]
    _previous_exit, _previous_os_exit = sys.exit, os._exit
    sys.exit, os._exit = _exit, _os_exit
    atexit.register(_note_end)
