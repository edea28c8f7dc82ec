"""Files of Chainer's snapshot extension: written safely, and found again."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from chainer.serializers import npz as chainer_npz

from chainermn_ng.extensions import snapshot_files

_TEMPORARY = "tmp-"


def save(filename: str, outdir: str, target: Any, savefun: Any, **kwds: Any) -> None:
    """Save as ``Writer.save`` does, in a file that is complete and on the disk."""
    folder = pathlib.Path(outdir)
    temporary = folder / f"{_TEMPORARY}{filename}"
    try:
        if savefun is chainer_npz.save_npz:
            # By an open file: NumPy would append .npz to a name.
            with open(temporary, "wb") as file:
                savefun(file, target, **kwds)
            snapshot_files.seal_archive(temporary)
        else:
            savefun(str(temporary), target, **kwds)
            with open(temporary, "r+b") as file:
                os.fsync(file.fileno())
        snapshot_files.commit(temporary, folder / filename)
    except BaseException:
        snapshot_files.discard(temporary)
        raise


def _matching(folder: pathlib.Path, pattern: Any) -> list[str]:
    """Return the files that a snapshot of this name may have written."""
    if callable(pattern) or not folder.is_dir():
        return []
    parts = [re.escape(part) for part in re.split(r"\{[^{}]*\}", pattern)]
    matcher = re.compile(".*".join(parts))
    return sorted(name for name in os.listdir(folder) if matcher.fullmatch(name))


def remove_leftovers(folder: pathlib.Path, pattern: Any) -> None:
    """Remove the temporary files of writes that were cut off.

    A name that a function makes cannot be told from others; nothing is removed then.
    """
    if not callable(pattern):
        for name in _matching(folder, f"{_TEMPORARY}{pattern}"):
            snapshot_files.discard(folder / name)


def held_files(folder: pathlib.Path, pattern: Any) -> dict[str, int]:
    """Return the iteration of each of a rank's files, as far as it can be told."""
    held = {}
    for name in _matching(folder, pattern):
        iteration = _iteration_of(folder / name)
        if iteration is None:
            # Damaged, or of a target without one: then the last number in its name.
            numbers = re.findall(r"\d+", name.rpartition(".")[0])
            iteration = int(numbers[-1]) if numbers else None
        if iteration is not None:
            held[name] = iteration
    return held


def _iteration_of(path: pathlib.Path) -> int | None:
    try:
        if not zipfile.is_zipfile(path):
            return None
        # NumPy leaves a file open that it opens by its name, and that is damaged.
        with open(path, "rb") as file, np.load(file, allow_pickle=True) as npz:
            if snapshot_files.META_KEY in npz:
                return int(snapshot_files.read_meta(npz)["iteration"])
            return int(npz["updater/iteration"])
    except Exception:
        # Whatever a damaged archive makes zipfile and NumPy raise: open_any tells.
        return None


@contextlib.contextmanager
def open_any(source: pathlib.Path | bytes) -> Iterator[Any]:
    """Open a sealed snapshot, or one of Chainer's own, whose parts have checksums."""
    with contextlib.ExitStack() as stack:
        try:
            npz = stack.enter_context(snapshot_files.open_checked(source))
        except snapshot_files.DamagedFileError:
            npz = stack.enter_context(_open_unsealed(source))
        yield npz


def _open_unsealed(source: pathlib.Path | bytes) -> Any:
    """Open a file of Chainer's snapshot extension after testing its checksums.

    Raises:
        DamagedFileError: a checksum is wrong, or it is no such file.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    with snapshot_files.damage_if_unreadable(), zipfile.ZipFile(file) as archive:
        bad = archive.testzip()
        is_sealed = f"{snapshot_files.META_KEY}.npy" in archive.namelist()
    if bad is not None:
        raise snapshot_files.DamagedFileError(f"damaged: wrong checksum of {bad}")
    if is_sealed:
        raise snapshot_files.DamagedFileError(
            "damaged: its content does not match its digest"
        )
    if isinstance(file, io.BytesIO):
        file.seek(0)
    with snapshot_files.damage_if_unreadable():
        return np.load(file, allow_pickle=True)


def description(npz: Any) -> dict[str, Any]:
    """Return what loading needs to know, also of files that do not say it."""
    meta = snapshot_files.read_meta(npz)
    if "extensions" not in meta:
        kinds = ("extensions/", "extension_triggers/")
        names = [key.split("/")[1] for key in npz if key.startswith(kinds)]
        meta["extensions"] = sorted(set(names))
    return meta
