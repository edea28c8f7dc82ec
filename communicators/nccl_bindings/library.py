"""The loaded NCCL library itself: its path, version, memory and error texts."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from communicators.errors import UnavailableError

SONAME = "libnccl.so.2"

#: The oldest NCCL that bindings accept: send and receive are taken for granted, and
#: they came with 2.7.
OLDEST_VERSION = (2, 8, 0)

INSTALL_LIBRARY = (
    "pip install 'chainermn-ng[cuda13]', or 'chainermn-ng[cuda12]' for CUDA 12, "
    "brings NCCL; one that is installed elsewhere is found through LD_LIBRARY_PATH, "
    "if that is set before Python starts"
)


class _DlInfo(ctypes.Structure):
    """``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol", ctypes.c_void_p),
    )


class NcclLibrary:
    """What the bindings' own packages do not tell about the library they call.

    Attributes:
        path: the file that was loaded.
        version: ``ncclGetVersion``'s number, such as 22707 for 2.27.7.
        memory: ``"cuda"`` for NVIDIA's library. Others may say by a function
            ``ncclEmulatorMemory`` that they take ``"host"`` memory, or let several
            ranks share one ``"device"``.

    Args:
        handle: the opened library.

    Raises:
        UnavailableError: it is too old.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        # Functions by index are objects of our own: attributes of the handle may be
        # shared with others, who give them other types.
        get_version = handle["ncclGetVersion"]
        get_version.argtypes = [ctypes.POINTER(ctypes.c_int)]
        version = ctypes.c_int()
        get_version(ctypes.byref(version))
        self.version = version.value
        self.path = _file_of(get_version)
        if version_parts(self.version) < OLDEST_VERSION:
            oldest = ".".join(map(str, OLDEST_VERSION[:2]))
            raise UnavailableError(
                f"{self} is too old: {oldest} or newer is needed; {INSTALL_LIBRARY}"
            )
        self._error_string = handle["ncclGetErrorString"]
        self._error_string.argtypes = [ctypes.c_int]
        self._error_string.restype = ctypes.c_char_p
        self._last_error = _text_function(handle, "ncclGetLastError")
        memory = _text_function(handle, "ncclEmulatorMemory")
        self.memory = "cuda" if memory is None else memory().decode()

    def __str__(self) -> str:
        return f"NCCL {version_text(self.version)} ({self.path})"

    def error_text(self, code: int) -> str:
        """Return the library's words for a code, and its last message if it has one.

        The last message (since NCCL 2.13) says what the code alone does not, such as
        which call of CUDA failed.
        """
        text = (self._error_string(code) or b"no text").decode(errors="replace")
        last = b"" if self._last_error is None else self._last_error(None) or b""
        if last.strip():
            text += f" (NCCL's last message: {last.decode(errors='replace').strip()})"
        return text


def version_parts(version: int) -> tuple[int, int, int]:
    """Return (major, minor, patch) of ``ncclGetVersion``'s number.

    Up to 2.8 it is MNPP, such as 2708; since 2.9 it is MNNPP, such as 22707.
    """
    major_unit = 1000 if version < 10000 else 10000
    major, rest = divmod(version, major_unit)
    return major, rest // 100, rest % 100


def version_text(version: int) -> str:
    """Return ``ncclGetVersion``'s number as people write it, such as ``"2.27.7"``."""
    return ".".join(map(str, version_parts(version)))


def find_loaded() -> ctypes.CDLL | None:
    """Return the NCCL that modules linked against it call; None if none is loaded.

    That is one whose functions are visible to the whole process, such as a library of
    LD_PRELOAD, or else the first that was loaded under NCCL's name.
    """
    process = ctypes.CDLL(None)
    if _has(process, "ncclGetVersion"):
        return process
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _has(handle: ctypes.CDLL, name: str) -> bool:
    try:
        handle[name]
    except AttributeError:
        return False
    return True


def _file_of(function: Any) -> str:
    """Return the path of the file that a C function was loaded from."""
    dladdr = ctypes.CDLL(None)["dladdr"]
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    if not dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info)):
        raise OSError("the dynamic linker does not know where NCCL's functions are")
    return os.fsdecode(info.file_name)


def _text_function(handle: ctypes.CDLL, name: str) -> Any:
    """Return a function of the library that gives a text; None if it has none."""
    if not _has(handle, name):
        return None
    function = handle[name]
    function.restype = ctypes.c_char_p
    return function
