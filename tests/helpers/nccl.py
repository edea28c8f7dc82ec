"""What the tests of NCCL need, and programs that load a library of the tests' own."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NoReturn

import pytest

from communicators import nccl_bindings
from communicators.nccl_bindings import NcclBinding

from .jobs import JobResult, mpiexec, run_command

#: The packages that the bindings are made of.
PACKAGES = {"cupy": "cupy", "pynccl": "pynccl"}

#: Set by whoever runs the tests with the emulator: then nothing may be skipped.
MEMORY_VARIABLE = "CHAINERMN_NG_NCCL_MEMORY"


def skip(reason: str, *, module: bool = False) -> NoReturn:
    """Skip the test or module, or fail it where everything has to be there."""
    if os.environ.get(MEMORY_VARIABLE) == "host":
        pytest.fail(f"{MEMORY_VARIABLE}=host, but {reason}")
    pytest.skip(reason, allow_module_level=module)


def need_package(binding: str) -> None:
    """Skip the test where a binding's package is not installed."""
    if importlib.util.find_spec(PACKAGES[binding]) is None:
        skip(f"{PACKAGES[binding]} is not installed")


def need_any_package() -> None:
    """Skip the module that calls this where no binding's package is installed."""
    if not any(map(importlib.util.find_spec, PACKAGES.values())):
        reason = "neither CuPy nor pynccl is installed; make venv-nccl has both"
        skip(reason, module=True)


def build_emulator() -> pathlib.Path:
    """Return the folder of the emulated NCCL on host memory; build it if need be."""
    if shutil.which("cc") is None:
        skip("there is no C compiler")
    from nccl_emulator.build import build

    return build("host")


def load_emulated(name: str) -> NcclBinding:
    """Load a binding in this process, over the emulated NCCL on host memory.

    LD_LIBRARY_PATH must have held the emulator's folder before Python started.
    """
    need_package(name)
    if reason := nccl_bindings.missing(name):
        skip(reason)
    binding = nccl_bindings.load(name)
    if binding.memory != "host":
        skip(f"{binding} is no emulation on host memory")
    return binding


def compile_library(
    source: pathlib.Path, folder: pathlib.Path, flags: Sequence[str] = ()
) -> pathlib.Path:
    """Compile a C file to ``folder/libnccl.so.2``, and return the folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        skip("there is no C compiler")
    options = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-Wall", "-Wextra"]
    target = str(folder / "libnccl.so.2")
    subprocess.run(
        [compiler, *options, "-Werror", *flags, "-o", target, str(source)],
        check=True,
        timeout=60,
    )
    return folder


def run_python(
    code: str,
    *,
    library: pathlib.Path | None,
    n_ranks: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> JobResult:
    """Run a program that finds NCCL's library in a folder, or in none.

    Warnings are errors in it. With several ranks mpiexec starts it.
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    if n_ranks > 1:
        command = [mpiexec(), "-n", str(n_ranks), *command]
    variables = {
        "LD_LIBRARY_PATH": "" if library is None else str(library),
        "NUMBA_NCCLLIB": "",
        "CHAINERMN_NG_NCCL_BINDING": "",
        MEMORY_VARIABLE: "",
        **(env or {}),
    }
    return run_command(command, env=variables, timeout_s=timeout_s)
