"""Make worker processes of a launched program see what the program sees.

A worker that multiprocessing spawns imports the main script anew, in an interpreter
that the launcher has not prepared: ``import chainermn``, and Chainer itself, would fail
there. (A forked worker inherits everything.)
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.spawn
import pathlib
from typing import Any

_original = multiprocessing.spawn.get_preparation_data


class _PrepareWorker:
    """Pickles as code that prepares the worker which unpickles it."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        folder = str(pathlib.Path(__file__).resolve().parents[2])
        return exec, (
            f"import sys; sys.path.append({folder!r})\n"
            "import chainermn_ng.launcher.worker_processes as worker\n"
            "worker.prepare_this_worker()",
        )


def _get_preparation_data(name: str) -> dict[str, Any]:
    data = _original(name)
    # The worker unpickles these data before it imports the main script, and ignores
    # keys that it does not know.
    data["chainermn_ng"] = _PrepareWorker()
    return data


def prepare_workers() -> None:
    """Have workers started by ``spawn`` and ``forkserver`` prepared from now on."""
    if multiprocessing.spawn.get_preparation_data is _get_preparation_data:
        return
    multiprocessing.spawn.get_preparation_data = _get_preparation_data
    # The fork server gets no such data: it must not import the main script early.
    multiprocessing.set_forkserver_preload([])


def prepare_this_worker() -> None:
    """Called in the worker, whose import of this module has prepared Chainer."""
    from chainermn_ng.launcher.old_name import answer_old_name

    answer_old_name()
    prepare_workers()
