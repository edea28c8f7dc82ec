"""Where in the user's program a collective was called from, for errors."""

from __future__ import annotations

import os
import sys

# Packages that stand between the user's program and a collective.
_between = {"communicators", *sys.stdlib_module_names}


def look_through(package: str) -> None:
    """Let :func:`call_place` name whoever calls a package, not its modules.

    Args:
        package: top-level name.
    """
    _between.add(package)


def call_place() -> str:
    """Return ``file:line`` of the innermost line of the user's program.

    That is the innermost frame of this thread whose module belongs neither to Python,
    nor to this package, nor to those named by :func:`look_through`. Empty if there is
    none, as in a thread of the library.
    """
    frame = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _between:
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _short(path: str) -> str:
    """Return a path below the working directory as seen from there."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here) if os.path.isabs(path) else path
