"""Snapshot files: written whole or not at all, and checked before they are read.

A file is an ``.npz`` archive, so ``numpy.load`` and ``chainer.serializers.load_npz``
read it. The archive's comment, which is the end of the file, holds a digest of
everything before it: it tells a file that was cut off or changed from a good one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

#: Entry of the archive with the description of the snapshot, as JSON in UTF-8.
META_KEY = "chainermn_ng/meta"

_DIGEST_BYTES = 32
_PREFIX = b"chainermn_ng blake2b "
_N_TAIL = len(_PREFIX) + 2 * _DIGEST_BYTES
_BLOCK_BYTES = 1 << 22


class DamagedFileError(ValueError):
    """A file does not hold what was written to it, or is no snapshot at all."""


@contextlib.contextmanager
def damage_if_unreadable() -> Iterator[None]:
    """Make one error of all that reading a damaged archive may raise.

    Its bytes decide on whether that is an error of ``zipfile``, ``zlib``, ``pickle``,
    ``struct``, NumPy or JSON, or a ``NotImplementedError`` or ``RuntimeError``.

    Raises:
        DamagedFileError: instead of these.
        OSError: as it comes: the file may be good.
    """
    try:
        yield
    except (OSError, DamagedFileError):
        raise
    except Exception as error:
        raise DamagedFileError(f"damaged: {type(error).__name__}: {error}") from error


def write_temporary(
    path: pathlib.Path, arrays: Mapping[str, Any], meta: Mapping[str, Any]
) -> None:
    """Write a snapshot under a temporary name; on return it is on the disk.

    The umask decides on its mode. After an error nothing is left behind.

    Args:
        path: must not exist.
        arrays: NumPy arrays, as Chainer's ``DictionarySerializer`` collects them.
        meta: the description; anything that JSON can hold.

    Raises:
        OSError: no space, no permission, no such folder, or the name is taken.
    """
    entries = {**arrays, META_KEY: encoded_meta(meta)}
    # Not by the tempfile module, whose files only their owner may read.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            _write_archive(file, entries)
            _seal(file)
    except BaseException:
        discard(path)
        raise


def seal_archive(path: pathlib.Path) -> None:
    """Put the digest into an ``.npz`` file of another writer, and it on the disk.

    Args:
        path: an archive without a comment.

    Raises:
        OSError: it cannot be written.
        zipfile.BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = _PREFIX + b"0" * (2 * _DIGEST_BYTES)
    with open(path, "r+b") as file:
        _seal(file)


def commit(temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Give a written file its name; on return the name is on the disk.

    Raises:
        OSError: as from ``os.replace`` and ``os.fsync``.
    """
    os.replace(temporary, final)
    sync_folder(final.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: pathlib.Path) -> None:
    """Remove a file that may be there, if that is possible."""
    with contextlib.suppress(OSError):
        os.remove(path)


@contextlib.contextmanager
def open_checked(source: pathlib.Path | bytes) -> Iterator[Any]:
    """Open a snapshot after comparing all of it with its digest.

    Args:
        source: the file, or its content.

    Yields:
        numpy.lib.npyio.NpzFile: reads an array when it is asked for it.

    Raises:
        DamagedFileError: it was cut off or changed, or is no snapshot.
        OSError: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        file: BinaryIO
        if isinstance(source, bytes):
            file = stack.enter_context(io.BytesIO(source))
        else:
            file = stack.enter_context(open(source, "rb"))
        _check(file)
        file.seek(0)
        # As Chainer does: None is saved as an array of objects.
        with damage_if_unreadable():
            npz = stack.enter_context(np.load(file, allow_pickle=True))
        yield npz


def read_meta(npz: Any) -> dict[str, Any]:
    """Return the description of an open snapshot; empty if it has none.

    Raises:
        DamagedFileError: it cannot be read.
    """
    if META_KEY not in npz:
        return {}
    with damage_if_unreadable():
        meta = json.loads(np.asarray(npz[META_KEY], np.uint8).tobytes().decode())
        if not isinstance(meta, dict):
            raise DamagedFileError("damaged: its description is none")
        return meta


def encoded_meta(meta: Mapping[str, Any]) -> np.ndarray:
    """Return a description as the archive holds it: JSON in UTF-8, as uint8.

    Scalars and arrays of NumPy and CuPy become numbers and lists, other numbers float.

    Raises:
        TypeError: there is something else in it.
    """
    text = json.dumps(dict(meta), default=_for_json)
    return np.frombuffer(text.encode(), np.uint8)


def _for_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _write_archive(file: BinaryIO, entries: Mapping[str, Any]) -> None:
    # Not by numpy.savez, where the names of entries are names of arguments.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in entries.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array))
        archive.comment = _PREFIX + b"0" * (2 * _DIGEST_BYTES)


def _seal(file: BinaryIO) -> None:
    file.flush()
    digest = _digest(file)
    file.seek(-2 * _DIGEST_BYTES, os.SEEK_END)
    file.write(digest)
    file.flush()
    os.fsync(file.fileno())


def _check(file: BinaryIO) -> None:
    n_bytes = file.seek(0, os.SEEK_END)
    if n_bytes < _N_TAIL:
        raise DamagedFileError(f"damaged: it has {n_bytes} bytes only")
    file.seek(-_N_TAIL, os.SEEK_END)
    tail = file.read()
    if not tail.startswith(_PREFIX):
        raise DamagedFileError(
            f"damaged: it has {n_bytes} bytes, and no digest at its end"
        )
    if tail[len(_PREFIX) :] != _digest(file):
        raise DamagedFileError("damaged: its content does not match its digest")


def _digest(file: BinaryIO) -> bytes:
    """Return the digest, in hexadecimal, of all that comes before it in a file."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    left = file.seek(0, os.SEEK_END) - 2 * _DIGEST_BYTES
    file.seek(0)
    while left > 0:
        block = file.read(min(left, _BLOCK_BYTES))
        if not block:
            raise DamagedFileError("damaged: it became shorter while it was read")
        hasher.update(block)
        left -= len(block)
    return hasher.hexdigest().encode()
