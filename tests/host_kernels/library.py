"""The pack and unpack kernels as a library for the host."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

from communicators.devices import flat_buffer_kernels

_HERE = pathlib.Path(__file__).resolve().parent
_WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def why_no_library() -> str | None:
    """Return why this machine cannot build the library, or None where it can."""
    return None if shutil.which("g++") else "no g++ here to compile kernels with"


def build(folder: pathlib.Path, *, sanitized: bool = False) -> pathlib.Path:
    """Compile the kernels' source into a library in ``folder``; return its path.

    Args:
        folder: exists.
        sanitized: end the process at the first access that is misaligned or out of
            bounds, and at any other undefined behaviour. Such a library loads only
            into a process that has AddressSanitizer already.
    """
    (folder / "flat_buffer.cu").write_text(flat_buffer_kernels.source())
    library = folder / "flat_buffer.so"
    # With the sanitizers -O2 takes twice as long, and finds no more.
    options = ["-O1", *_SANITIZERS] if sanitized else ["-O2"]
    argv = ["g++", "-std=c++14", "-fPIC", "-shared", *_WARNINGS, *options]
    argv += [f"-I{_HERE}", f"-I{folder}", str(_HERE / "flat_buffer_driver.cpp")]
    argv += ["-o", str(library)]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return library


class HostLauncher:
    """Launches kernels of a host library, and remembers the launches.

    Args:
        library: path from :func:`build`.

    Attributes:
        launches: kernel name, grid and block of each launch.
        only_blocks: ``(first, number)`` of the blocks to run, ``None`` for all.
    """

    def __init__(self, library: pathlib.Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.launches: list[tuple[str, int, int]] = []
        self.only_blocks: tuple[int, int] | None = None

    def launch(
        self, kernel_name: str, grid: int, block: int, args: Sequence[int | float]
    ) -> None:
        """Run a kernel, thread after thread."""
        kernel = getattr(self._library, kernel_name)
        run = getattr(self._library, f"launch_{kernel_name.split('_')[0]}")
        numbers = (grid, block, *(self.only_blocks or (0, grid)))
        converted = [
            ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)
            for x in args
        ]
        run(kernel, *map(ctypes.c_uint, numbers), *converted)
        self.launches.append((kernel_name, grid, block))
