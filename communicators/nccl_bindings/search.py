"""Where NCCL's library is, for a binding that has to be told."""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from collections.abc import Iterator

from communicators.errors import UnavailableError
from communicators.nccl_bindings.library import (
    INSTALL_LIBRARY,
    SONAME,
    find_loaded,
)


def open_library(variable: str) -> ctypes.CDLL:
    """Open the NCCL library that this process should use.

    It is looked for where the environment variable says, among the libraries that are
    loaded already (two copies of NCCL in one process would each have memory and
    threads of their own), in the folders of LD_LIBRARY_PATH, in those of NVIDIA's pip
    packages, and where the system looks.

    Args:
        variable: name of an environment variable that holds a folder.

    Raises:
        UnavailableError: there is none, or none in the folder that the variable names.
    """
    folder = os.environ.get(variable)
    if folder:
        found = pathlib.Path(folder) / SONAME
        if not found.is_file():
            raise UnavailableError(f"{variable}={folder}: no {SONAME} in that folder")
        return _open(found)
    loaded = find_loaded()
    if loaded is not None:
        return loaded
    for path in _candidates():
        if path.is_file():
            return _open(path)
    try:
        return ctypes.CDLL(SONAME)
    except OSError as error:
        raise UnavailableError(
            f"NCCL's library is not found ({error}); {INSTALL_LIBRARY}"
        ) from error


def _candidates() -> Iterator[pathlib.Path]:
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder:
            yield pathlib.Path(folder) / SONAME
    for entry in sys.path:
        yield pathlib.Path(entry) / "nvidia" / "nccl" / "lib" / SONAME


def _open(path: pathlib.Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be loaded ({error})") from error
