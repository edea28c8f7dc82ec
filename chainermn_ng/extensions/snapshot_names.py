"""Names of a run's snapshot files, finished and temporary."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import socket

#: A set of files, one a rank: its iteration, and how often that one was written before.
SetKey = tuple[int, int]


class SnapshotNames:
    """Names of the files of one run.

    ``<name>.<rank>.<iteration>``, as ChainerMN names them. Where that name is taken,
    because a resumed run comes to the same iteration once more, ``-1``, ``-2`` ...
    follows: no file is ever overwritten, so an older set stays whole until the newer
    one is.

    Args:
        name: of the run.

    Raises:
        ValueError: no name for a file.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise ValueError(
                f"name {name!r} of a snapshot: expected a text that can begin a file "
                "name"
            )
        self.name = name
        ours = rf"{re.escape(name)}\.(?P<rank>\d+)\.(?P<iteration>\d+)"
        ours += r"(?:-(?P<again>\d+))?"
        self._finished = re.compile(ours)
        self._temporary = re.compile(rf"tmp-{ours}\.(?P<host>.*)\.(?P<pid>\d+)")

    def finished(self, rank: int, key: SetKey) -> str:
        """Return the name of a rank's file in a set."""
        iteration, again = key
        return f"{self.name}.{rank}.{iteration}" + (f"-{again}" if again else "")

    def temporary(self, rank: int, key: SetKey) -> str:
        """Return the name under which this process writes that file."""
        return f"tmp-{self.finished(rank, key)}.{socket.gethostname()}.{os.getpid()}"

    def listing(self, folder: pathlib.Path) -> dict[SetKey, list[int]]:
        """Return the ranks whose files are in a folder, for each set.

        A folder that does not exist holds none.

        Raises:
            OSError: it cannot be read, or is no folder.
        """
        sets: dict[SetKey, list[int]] = {}
        try:
            file_names = os.listdir(folder)
        except FileNotFoundError:
            return {}
        for file_name in file_names:
            match = self._finished.fullmatch(file_name)
            if match:
                key = int(match["iteration"]), int(match["again"] or 0)
                sets.setdefault(key, []).append(int(match["rank"]))
        return {key: sorted(ranks) for key, ranks in sets.items()}

    def remove_leftovers(self, folder: pathlib.Path, rank: int, size: int) -> None:
        """Remove temporary files that crashed writers have left behind.

        Those of this rank, and of ranks that the job no longer has; but none whose
        writer may be alive: a process of that number on this host.
        """
        for file_name in os.listdir(folder):
            match = self._temporary.fullmatch(file_name)
            if match is None or not (
                int(match["rank"]) == rank or int(match["rank"]) >= size
            ):
                continue
            is_here = match["host"] == socket.gethostname()
            if is_here and _is_running(int(match["pid"])):
                continue
            # Another rank may be about to remove the same one.
            with contextlib.suppress(FileNotFoundError):
                os.remove(folder / file_name)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
