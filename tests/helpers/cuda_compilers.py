"""The CUDA compilers of this machine, where there are any. None needs a GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def _cuda_folders() -> list[pathlib.Path]:
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    return [pathlib.Path(p) for p in (*named, "/usr/local/cuda") if p]


@functools.cache
def find_nvcc() -> str | None:
    """Return the path of nvcc, None where there is none."""
    places = [str(folder / "bin") for folder in _cuda_folders()]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))


@dataclass(frozen=True)
class KernelReport:
    """What nvcc's assembler says of a kernel."""

    name: str
    n_registers: int
    stack_bytes: int
    spill_bytes: int


def nvcc_architectures(nvcc: str) -> list[int]:
    """Return the compute capabilities that nvcc compiles for, as 10 major + minor."""
    listed = _run([nvcc, "--list-gpu-arch"]).stdout
    return sorted({int(n) for n in re.findall(r"^compute_(\d+)$", listed, re.M)})


def compile_by_nvcc(
    nvcc: str, source: str, architecture: int, folder: pathlib.Path
) -> list[KernelReport]:
    """Compile a source to a cubin; return what became of its kernels.

    Raises:
        AssertionError: an error, or a warning.
    """
    path = folder / "source.cu"
    path.write_text(source)
    argv = [nvcc, "-cubin", f"-arch=sm_{architecture}", "-std=c++14", "-Xptxas=-v"]
    argv += ["-Werror", "all-warnings", str(path), "-o", str(folder / "cubin")]
    done = _run(argv)
    assert done.returncode == 0, done.stderr
    kernel = re.compile(
        r"Compiling entry function '(?P<name>\w+)'.*?"
        r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
        re.DOTALL,
    )
    return [
        KernelReport(
            found["name"],
            int(found["registers"]),
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
        )
        for found in kernel.finditer(done.stderr + done.stdout)
    ]


@functools.cache
def find_nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC: the system's, or that of the wheels that CuPy uses."""
    for path in _nvrtc_places():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _nvrtc_places() -> Iterator[pathlib.Path]:
    names = ["libnvrtc.so", *(f"libnvrtc.so.{version}" for version in ("13", "12"))]
    yield from map(pathlib.Path, names)
    for folder in _cuda_folders():
        yield from (folder / "lib64" / name for name in names)
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(pathlib.Path(root).glob("*/lib/libnvrtc.so.*[0-9]"))


def compile_by_nvrtc(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> str:
    """Compile a source to PTX without any header; return the PTX.

    Raises:
        AssertionError: an error; the text is the compiler's log.
    """
    program = ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"source.cu", 0, None, None
    )
    assert created == 0, created
    try:
        given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        assert not failed, log
        return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(get_size: ctypes._CFuncPtr, get: ctypes._CFuncPtr, program: object) -> str:  # type: ignore[name-defined]
    size = ctypes.c_size_t()
    assert get_size(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert get(program, text) == 0
    return text.value.decode()


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=110, check=False
    )
