"""Sets of snapshot files, one a rank: written by all ranks together, and found again.

A set comes into being in three steps: every rank writes its file under a temporary name
and brings it to the disk; the ranks agree that all have done so; then each gives its
file the final name. So a set of which any file has its final name was written to the
end on all ranks. A set counts when all its files are there.

Nothing here needs a file system that the ranks share: each looks into its own folder,
they tell each other what they see, and a rank that does not see the file that it needs
gets it from one that does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import communicators
from chainermn_ng.extensions import snapshot_files as files
from chainermn_ng.extensions.snapshot_names import SetKey, SnapshotNames

_TAG = 15_991
_MESSAGE_BYTES = 64 << 20

View = dict[SetKey, list[int]]


def agree(
    engine: communicators.CommunicatorBase,
    label: str,
    error: BaseException | None,
    details: str = "",
) -> None:
    """Meet the other ranks; raise on all of them if some rank brings an error."""
    try:
        engine.agree(label, details, error=error)
    except Exception as shared:
        if error is None:
            raise
        raise shared from error


def write_set(
    engine: communicators.CommunicatorBase,
    names: SnapshotNames,
    folder: pathlib.Path,
    iteration: int,
    content: tuple[Mapping[str, Any], Mapping[str, Any], bytes] | None,
    error: BaseException | None = None,
) -> SetKey:
    """Write a set. Collective; on return it is complete on all ranks.

    Args:
        engine: the communicator.
        names: of the files.
        folder: of this rank; made if need be.
        iteration: the same on all ranks.
        content: arrays, description, and a digest of the model; ``None`` with
            ``error``.
        error: why this rank has nothing to write.

    Returns:
        SetKey: of the set.

    Raises:
        OSError, ...: some rank cannot write; raised on all ranks. Older sets are as
            they were.
        MismatchError: the ranks are at different iterations.
    """
    label = f"snapshot {names.name!r}"
    again = 0
    try:
        if error is None:
            os.makedirs(folder, exist_ok=True)
            names.remove_leftovers(folder, engine.rank, engine.size)
            listing = names.listing(folder)
            again = max((k + 1 for i, k in listing if i == iteration), default=0)
    except OSError as failure:
        error = failure
    agree(engine, label, error, f"iteration {iteration}")
    assert content is not None
    arrays, meta, model = content
    told = engine.allgather_obj((again, model, os.urandom(8)))
    key = iteration, max(other[0] for other in told)
    meta = {
        **meta,
        "iteration": iteration,
        "rank": engine.rank,
        "size": engine.size,
        "set": hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest(),
        "replicated": len({other[1] for other in told}) == 1,
    }
    temporary = folder / names.temporary(engine.rank, key)
    try:
        files.write_temporary(temporary, arrays, meta)
    except Exception as failure:
        error = failure
    try:
        agree(engine, f"{label}, writing {iteration}", error)
    except BaseException:
        files.discard(temporary)
        raise
    try:
        files.commit(temporary, folder / names.finished(engine.rank, key))
    except OSError as failure:
        error = failure
    # From here on nothing is taken back: other ranks may know that the set is complete.
    agree(engine, f"{label}, finishing {iteration}", error)
    return key


def remove_sets(
    engine: communicators.CommunicatorBase,
    names: SnapshotNames,
    folder: pathlib.Path,
    keep: list[SetKey],
) -> None:
    """Remove this rank's files of sets older than the newest one to keep.

    Also those of ranks that the job does not have. Not collective.

    Args:
        engine: the communicator.
        names: of the files.
        folder: of this rank.
        keep: the sets that stay, equal on all ranks; none of them to remove all sets.
    """
    for key, ranks in sorted(names.listing(folder).items()):
        if key in keep or (keep and key > max(keep)):
            continue
        for rank in ranks:
            if rank == engine.rank or rank >= engine.size:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(folder / names.finished(rank, key))


@dataclass
class FoundSet:
    """A set that can be loaded.

    Attributes:
        key: its iteration, and how often that had been written before.
        size: number of ranks that wrote it.
        files: of which rank the file is that each rank loads.
        keepers: rank that has verified each file, by the file's rank.
        older: keys of older sets, seen by name.
        faults: what was skipped, and why, in words; newest first.
        token: of the set.
        is_whole: whether all its files are there.
    """

    key: SetKey
    size: int
    files: list[int]
    keepers: dict[int, int]
    older: list[SetKey]
    faults: list[str]
    token: str
    is_whole: bool = True

    def is_own(self, rank: int) -> bool:
        """Tell whether a rank loads what the same rank of as many wrote."""
        return self.size == len(self.files) and self.files[rank] == rank


@dataclass
class _Examined:
    """What the ranks have found of one set; all of them know the same."""

    valid: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    keepers: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def find_set(
    engine: communicators.CommunicatorBase,
    names: SnapshotNames,
    folder: pathlib.Path,
    error: BaseException | None = None,
) -> tuple[FoundSet | None, list[str]]:
    """Find the newest set that can be loaded on all ranks. Collective.

    Every file of it is read and compared with its digest, by one rank each. If no set
    is complete, the newest is taken of which some files are left, if all ranks had the
    same model.

    Args:
        engine: the communicator.
        names: of the files.
        folder: of this rank.
        error: why this rank cannot look.

    Returns:
        tuple: the set, or ``None``; and what was skipped, and why, in words.

    Raises:
        OSError: a folder cannot be read; on all ranks.
    """
    mine: View = {}
    try:
        if error is None:
            mine = names.listing(folder)
    except OSError as failure:
        error = failure
    agree(engine, f"snapshot {names.name!r}, looking for files", error)
    views: list[View] = engine.allgather_obj(mine)
    keys = sorted({key for view in views for key in view}, reverse=True)
    faults: list[str] = []
    remains = None
    for n, key in enumerate(keys):
        examined = _examine(engine, names, folder, key, views)
        found = _choose(engine.size, names, key, examined)
        if found is not None:
            found.older = keys[n + 1 :]
            if not examined.faults:
                found.faults = faults
                return found, faults
            remains = remains or found
        faults += examined.faults
    if remains is not None:
        remains.faults, remains.is_whole = faults, False
    return remains, faults


def _examine(
    engine: communicators.CommunicatorBase,
    names: SnapshotNames,
    folder: pathlib.Path,
    key: SetKey,
    views: list[View],
) -> _Examined:
    examined = _Examined()
    for file_rank in sorted({r for view in views for r in view.get(key, [])}):
        seen_by = [r for r, view in enumerate(views) if file_rank in view.get(key, [])]
        keeper = (
            file_rank if file_rank in seen_by else seen_by[file_rank % len(seen_by)]
        )
        examined.keepers[file_rank] = keeper
    checked: dict[int, Mapping[str, Any] | str] = {}
    for file_rank, keeper in examined.keepers.items():
        if keeper == engine.rank:
            path = folder / names.finished(file_rank, key)
            checked[file_rank] = _check(path, key[0], file_rank)
    for other in engine.allgather_obj(checked):
        for file_rank, result in other.items():
            if isinstance(result, str):
                name = names.finished(file_rank, key)
                examined.faults.append(f"{name} of rank {file_rank}: {result}")
            else:
                examined.valid[file_rank] = result
    _complain_of_gaps(names, key, examined)
    return examined


def _check(path: pathlib.Path, iteration: int, rank: int) -> Mapping[str, Any] | str:
    """Return the short description of a good file, or what is wrong with it."""
    try:
        with files.open_checked(path) as npz:
            meta = files.read_meta(npz)
            if (meta["iteration"], meta["rank"]) != (iteration, rank):
                return (
                    f"renamed: it was written by rank {meta['rank']} at iteration "
                    f"{meta['iteration']}"
                )
            return {name: meta[name] for name in ("set", "size", "replicated")}
    except KeyError as error:
        return f"no description of it: {error}"
    except Exception as error:
        return str(error)


def _complain_of_gaps(names: SnapshotNames, key: SetKey, examined: _Examined) -> None:
    if not examined.valid:
        return
    tokens = {meta["set"] for meta in examined.valid.values()}
    if len(tokens) > 1:
        examined.faults.append(
            f"iteration {key[0]}: its files were not written together"
        )
        examined.valid.clear()
        return
    size = next(iter(examined.valid.values()))["size"]
    for file_rank in range(size):
        if file_rank not in examined.keepers:
            name = names.finished(file_rank, key)
            examined.faults.append(f"{name} of rank {file_rank}: missing")


def _choose(
    size: int, names: SnapshotNames, key: SetKey, examined: _Examined
) -> FoundSet | None:
    """Decide which rank loads which file, if that is possible."""
    valid = examined.valid
    if not valid:
        return None
    first = next(iter(valid.values()))
    if not first["replicated"] and (first["size"] != size or examined.faults):
        if first["size"] != size:
            examined.faults.append(
                f"iteration {key[0]}: its {first['size']} ranks had different models, "
                f"which {size} ranks cannot take over"
            )
        return None
    left = sorted(valid)
    wanted = [rank % first["size"] for rank in range(size)]
    chosen = [
        file_rank if file_rank in valid else left[rank % len(left)]
        for rank, file_rank in enumerate(wanted)
    ]
    return FoundSet(key, first["size"], chosen, examined.keepers, [], [], first["set"])


@contextlib.contextmanager
def open_set(
    engine: communicators.CommunicatorBase,
    names: SnapshotNames,
    folder: pathlib.Path,
    found: FoundSet,
) -> Iterator[Any]:
    """Open this rank's file of a set, wherever it lies. Collective.

    Yields:
        numpy.lib.npyio.NpzFile: verified.

    Raises:
        OSError: a file has gone since it was found; on all ranks.
    """
    file_rank = found.files[engine.rank]
    with contextlib.ExitStack() as stack:
        npz, error = None, None
        try:
            candidate = stack.enter_context(
                files.open_checked(folder / names.finished(file_rank, found.key))
            )
            meta = files.read_meta(candidate)
            if (meta.get("set"), meta.get("rank")) == (found.token, file_rank):
                npz = candidate
        except (OSError, files.DamagedFileError):
            # Not here, or the file of another job: the keeper has a good one.
            npz = None
        content = _travel(engine, names, folder, found, npz is None)
        if npz is None:
            try:
                if content is None:
                    raise OSError(
                        f"{names.finished(file_rank, found.key)} has gone since it was "
                        "found"
                    )
                npz = stack.enter_context(files.open_checked(content))
            except (OSError, files.DamagedFileError) as failure:
                error = failure
        agree(engine, f"snapshot {names.name!r}, opening {found.key[0]}", error)
        yield npz


def _travel(
    engine: communicators.CommunicatorBase,
    names: SnapshotNames,
    folder: pathlib.Path,
    found: FoundSet,
    needs: bool,
) -> bytes | None:
    """Send files to the ranks that do not see them; return what came here."""
    content = None
    # All ranks go through the same list in the same order, so nobody waits in a ring.
    for rank, is_waiting in enumerate(engine.allgather_obj(needs)):
        keeper = found.keepers[found.files[rank]]
        if not is_waiting or keeper == rank:
            continue
        if engine.rank == keeper:
            path = folder / names.finished(found.files[rank], found.key)
            _send_file(engine, path, rank)
        elif engine.rank == rank:
            content = _receive_file(engine, keeper)
    return content


def _send_file(
    engine: communicators.CommunicatorBase, path: pathlib.Path, dest: int
) -> None:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError:
        engine.send_obj(None, dest, _TAG)
        return
    engine.send_obj(content.size, dest, _TAG)
    for start in range(0, content.size, _MESSAGE_BYTES):
        engine.send(content[start : start + _MESSAGE_BYTES], dest, _TAG)


def _receive_file(engine: communicators.CommunicatorBase, source: int) -> bytes | None:
    n_bytes = engine.recv_obj(source, _TAG)
    if n_bytes is None:
        return None
    content = np.empty(n_bytes, np.uint8)
    for start in range(0, n_bytes, _MESSAGE_BYTES):
        content[start : start + _MESSAGE_BYTES] = engine.recv(source, _TAG)
    return content.tobytes()
