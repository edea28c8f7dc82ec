"""End the whole job when one rank meets an exception that nobody catches.

Without this, the other ranks wait in their next collective for ever
(chainer/chainermn#236). ``import chainermn_ng`` installs the hook. It acts only in jobs
of more than one rank, only in the ranks themselves (not in worker processes), and not
in interactive sessions.

Environment variables:

- ``CHAINERMN_NG_ABORT_ON_EXCEPTION=0`` turns it off.
- ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION``, ChainerMN's, turns it on again if not empty;
  it is on anyway.

``sys.exit(n)`` with another status than 0 ends the job with that status, too; see
:mod:`chainermn_ng.exit_hooks`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import communicators
from chainermn_ng import exit_hooks, job_control

__all__ = ["add_hook"]

KEYBOARD_INTERRUPT_STATUS = 130  # 128 + SIGINT, as shells have it

# An error that all ranks raise is printed by one of them, which ends the job. The
# others print it too if they are still there after this.
_OTHERS_TELL_AFTER_S = 3.0

_previous_except_hook: Any = None
_previous_threading_hook: Any = None
_running = threading.local()


def enabled() -> bool:
    """Tell whether an uncaught exception shall end the job (see the module)."""
    if os.environ.get("CHAINERMN_FORCE_ABORT_ON_EXCEPTION"):
        return True
    value = os.environ.get("CHAINERMN_NG_ABORT_ON_EXCEPTION", "1")
    return value.strip().lower() not in ("0", "false", "no", "off", "")


def _is_interactive() -> bool:
    # A typing error at the prompt of ``python -i`` is no reason to kill the job.
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def end_job_for(error_type: type[BaseException], value: BaseException | None) -> None:
    """End the job for an uncaught exception, whose traceback is printed already."""
    if not enabled() or _is_interactive():
        return
    status = (
        KEYBOARD_INTERRUPT_STATUS if issubclass(error_type, KeyboardInterrupt) else 1
    )
    text = "".join(traceback.format_exception_only(error_type, value)).strip()
    job_control.end_job(status, f"uncaught {text}")


def _let_another_rank_tell(value: BaseException | None) -> None:
    """Wait if all ranks raise this error, and another one is to print it."""
    is_everywhere = isinstance(value, communicators.MismatchError)
    is_first = job_control.rank_and_size()[0] == 0
    elsewhere = getattr(value, "is_told_elsewhere", is_everywhere and not is_first)
    if elsewhere and enabled() and not _is_interactive():
        time.sleep(_OTHERS_TELL_AFTER_S)


def _except_hook(
    error_type: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
) -> None:
    if getattr(_running, "is_inside", False):
        # Somebody's hook, installed after ours, calls ours; and since ``add_hook`` was
        # called once more, ours calls theirs.
        sys.__excepthook__(error_type, value, trace)
        return
    _running.is_inside = True
    _let_another_rank_tell(value)
    try:
        _previous_except_hook(error_type, value, trace)
    except Exception:
        # A broken hook of the user's must neither hide the error nor keep the job.
        traceback.print_exc()
        sys.__excepthook__(error_type, value, trace)
    finally:
        _running.is_inside = False
        end_job_for(error_type, value)


def _threading_hook(args: Any) -> None:
    if getattr(_running, "is_inside", False):
        threading.__excepthook__(args)
        return
    _running.is_inside = True
    _let_another_rank_tell(args.exc_value)
    try:
        _previous_threading_hook(args)
    except Exception:
        traceback.print_exc()
        threading.__excepthook__(args)
    finally:
        _running.is_inside = False
        # As in Python itself, a thread may leave by SystemExit.
        if not issubclass(args.exc_type, SystemExit):
            end_job_for(args.exc_type, args.exc_value)


def add_hook() -> None:
    """Install the hook behind ``sys.excepthook`` and ``threading.excepthook``.

    The hooks that are installed now are called first, so the traceback is printed once,
    in the way the user (or a test runner) has chosen. Calling this again is harmless.
    Also reinstalls the hook where somebody has replaced it since.
    """
    global _previous_except_hook, _previous_threading_hook
    if sys.excepthook is not _except_hook:
        _previous_except_hook = sys.excepthook
        sys.excepthook = _except_hook
    if threading.excepthook is not _threading_hook:
        _previous_threading_hook = threading.excepthook
        threading.excepthook = _threading_hook
    exit_hooks.add_hooks(enabled)


def _add_hook_if_enabled() -> None:
    """ChainerMN's name for what ``import chainermn_ng`` does: install unless off."""
    if enabled():
        add_hook()
