"""Build the NCCL emulator: ``libnccl.so.2`` on host memory, or over the CUDA runtime.

``python tests/nccl_emulator/build.py [host|asan|cuda]`` prints the folder of the
library. It is compiled again only when its sources or its command have changed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess

SOURCES = pathlib.Path(__file__).resolve().parent / "src"
BUILD = SOURCES.parents[2] / "build" / "nccl_emulator"
LIBRARY = "libnccl.so.2"
KINDS = ("host", "asan", "cuda")
BUILD_TIMEOUT_S = 120

OPTIONS = ["-O2", "-g", "-fPIC", "-pthread", "-fvisibility=hidden"]
# One rounding an operation, on every processor: results are compared bit for bit.
OPTIONS += ["-ffp-contract=off"]
OPTIONS += ["-Wall", "-Wextra", "-Werror"]
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]


class CannotBuildError(RuntimeError):
    """A compiler is missing, or it refused the sources; the text says which."""


def find_compiler(kind: str) -> str | None:
    """Return the compiler for a kind of library, None where there is none."""
    if kind == "cuda":
        names = ["nvcc", *_nvcc_of_pip(), "/usr/local/cuda/bin/nvcc"]
    else:
        names = [os.environ.get("CC") or "cc", "cc", "gcc"]
    return next(filter(None, map(shutil.which, names)), None)


def _nvcc_of_pip() -> list[str]:
    """Return where the package nvidia-cuda-nvcc has put nvcc, if it is installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return [str(p) for r in roots or () for p in pathlib.Path(r).glob("cu*/bin/nvcc")]


def sources(kind: str) -> list[pathlib.Path]:
    """Return the C files of a kind of library, sorted."""
    other = "memory_host.c" if kind == "cuda" else "memory_cuda.c"
    return sorted(path for path in SOURCES.glob("*.c") if path.name != other)


def compile_command(kind: str, output: pathlib.Path) -> list[str]:
    """Return the command that makes the library.

    Raises:
        CannotBuildError: there is no compiler for it.
        ValueError: ``kind`` is not known.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind {kind!r} of the emulator; known: {', '.join(KINDS)}")
    compiler = find_compiler(kind)
    if compiler is None:
        needed = "nvcc (CUDA toolkit, or pip install nvidia-cuda-nvcc)"
        needed = needed if kind == "cuda" else "a C compiler (cc or gcc) on PATH"
        raise CannotBuildError(f"the NCCL emulator ({kind}) needs {needed}")
    files = [str(path) for path in sources(kind)]
    if kind == "cuda":
        # The runtime is linked in: the library needs nothing but the driver. The
        # options also reach a C++ stub of nvcc's own, so that they cannot name a C.
        host = ["-Xcompiler", ",".join(OPTIONS), "-Xlinker", f"-soname={LIBRARY}"]
        hidden = ["-Xlinker", "--exclude-libs=ALL"]
        command = [compiler, "-shared", "-cudart", "static", *host, *hidden, *files]
    else:
        extra = SANITIZERS if kind == "asan" else []
        link = ["-shared", f"-Wl,-soname,{LIBRARY}"]
        command = [compiler, *OPTIONS, *extra, *link, *files]
    return [*command, "-o", str(output)]


def fingerprint(kind: str) -> str:
    """Return a digest of everything that the library is made of."""
    digest = hashlib.sha256(repr(compile_command(kind, BUILD)).encode())
    for path in sorted([*sources(kind), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(kind: str = "host") -> pathlib.Path:
    """Make the library where that is needed, and return its folder.

    Safe in several processes at once: one compiles, the others wait for it, and the
    finished file is put in place in one move.

    Args:
        kind (str): ``"host"``; ``"asan"``, the same under AddressSanitizer and
            UndefinedBehaviorSanitizer; or ``"cuda"``, on device memory.

    Raises:
        CannotBuildError: there is no compiler for it, or it failed.
        ValueError: ``kind`` is not known.
    """
    wanted = fingerprint(kind)
    folder = BUILD / kind
    folder.mkdir(parents=True, exist_ok=True)
    library, stamp = folder / LIBRARY, folder / "fingerprint"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists() and stamp.exists() and stamp.read_text() == wanted:
            return folder
        unfinished = folder / f"{LIBRARY}.unfinished"
        done = subprocess.run(
            compile_command(kind, unfinished),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise CannotBuildError(f"{' '.join(done.args)}\n{done.stdout}")
        stamp.unlink(missing_ok=True)
        unfinished.replace(library)
        stamp.write_text(wanted)
    return folder


def main() -> None:
    """Print the folder of the library that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", default="host", choices=KINDS)
    print(build(parser.parse_args().kind))


if __name__ == "__main__":
    main()
