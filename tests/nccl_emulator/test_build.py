"""The build: by several processes at once, with sanitizers, and for CUDA."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from nccl_emulator import build as emulator_build
from nccl_emulator.library import Library, NcclFailure
from nccl_emulator.programs import (
    collectives,
    device_memory,
    failures,
    groups,
    overrun,
)
from nccl_emulator.ranks import TESTS, RankServer

HERE = pathlib.Path(__file__).parent

needs_nvcc = pytest.mark.skipif(
    emulator_build.find_compiler("cuda") is None,
    reason="no nvcc (CUDA toolkit) on PATH or in /usr/local/cuda",
)


def exported(library: pathlib.Path) -> set[str]:
    """Return the names that a library offers."""
    command = ["nm", "-D", "--defined-only", str(library)]
    lines = subprocess.check_output(command, text=True, timeout=30).splitlines()
    return {line.split()[-1] for line in lines}


def test_it_offers_what_the_bindings_need_and_nothing_else():
    names = exported(emulator_build.build() / emulator_build.LIBRARY)
    assert all(name.startswith("nccl") for name in names)
    header = (emulator_build.SOURCES / "nccl_api.h").read_text()
    declared = re.findall(r"EXPORT [^(;]*?(nccl\w+)\(", header)
    assert names == set(declared)
    needed = set()
    for package, pattern in [
        ("cupy_backends", "cuda/libs/nccl*.so"),
        ("pynccl", "binding.py"),
    ]:
        spec = importlib.util.find_spec(package)
        if spec is None:
            continue
        for folder in map(pathlib.Path, spec.submodule_search_locations):
            for path in folder.glob(pattern):
                if path.suffix == ".py":
                    text = path.read_text()
                    needed |= set(re.findall(r"(nccl\w+) = ctype_function", text))
                else:
                    output = subprocess.check_output(
                        ["nm", "-D", "--undefined-only", str(path)],
                        text=True,
                        timeout=30,
                    )
                    needed |= set(re.findall(r" U (nccl\w+)", output))
    assert needed <= names


def _compiler(folder: pathlib.Path, body: str) -> pathlib.Path:
    """Write a compiler that notes each call, and whose last argument is the output."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\necho call >> "{folder}/calls"\n{body}\n')
    path.chmod(0o755)
    return path


_BUILD_INTO = """
import pathlib, sys
from nccl_emulator import build
build.BUILD = pathlib.Path(sys.argv[1])
print(build.build())
"""


def _start_build(folder: pathlib.Path, compiler: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD_INTO, str(folder / "build")],
        env={**os.environ, "CC": str(compiler), "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_processes_that_build_at_once_compile_once(tmp_path):
    body = 'sleep 0.5\nfor last; do :; done\necho done > "$last"'
    compiler = _compiler(tmp_path, body)
    for _ in range(2):
        builds = [_start_build(tmp_path, compiler) for _ in range(3)]
        outputs = [process.communicate(timeout=60)[0].strip() for process in builds]
        assert outputs == [str(tmp_path / "build" / "host")] * 3
    library = tmp_path / "build" / "host" / emulator_build.LIBRARY
    assert library.read_text() == "done\n"
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_compiler_that_fails_leaves_no_library(tmp_path):
    compiler = _compiler(tmp_path, 'echo "cannot do that"\nexit 1')
    output = _start_build(tmp_path, compiler).communicate(timeout=60)[0]
    assert "CannotBuildError" in output
    assert "cannot do that" in output
    assert not (tmp_path / "build" / "host" / emulator_build.LIBRARY).exists()


def test_without_a_compiler_the_error_says_what_is_needed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(emulator_build, "BUILD", tmp_path)
    with pytest.raises(emulator_build.CannotBuildError, match="needs a C compiler"):
        emulator_build.build()


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="known: host, asan, cuda"):
        emulator_build.build("tpu")


def _sanitizer(name: str) -> str:
    """Return a runtime of the compiler's sanitizers, "" where it has none."""
    compiler = emulator_build.find_compiler("host")
    command = [compiler, f"-print-file-name=lib{name}.so"]
    path = subprocess.check_output(command, text=True, timeout=30).strip()
    return path if os.path.isabs(path) else ""


@pytest.fixture(scope="module")
def sanitized():
    """Starts ranks under AddressSanitizer; Python's own memory is not looked at."""
    if not _sanitizer("asan"):
        pytest.skip("the compiler has no AddressSanitizer")
    env = {
        "LD_PRELOAD": _sanitizer("asan"),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    with RankServer(emulator_build.build("asan"), env) as running:
        yield running


@pytest.mark.parametrize(
    ("program", "n_ranks", "args"),
    [
        (collectives.random_calls, 3, (60, 5)),
        (collectives.every_half, 2, ()),
        (groups.all_to_all, 3, (40_001,)),
        (groups.mixed_group, 2, ()),
        (groups.error_in_group, 2, ()),
        (groups.splits, 4, ()),
        (groups.splits_in_group, 2, ()),
        (groups.many_lives, 2, ()),
        (failures.circle, 3, ()),
        (failures.mismatch, 3, (failures.MISMATCHES["count"],)),
        (failures.wrong_arguments, 2, ()),
        (failures.abort_while_waiting, 2, ("group",)),
        (failures.abort_while_waiting, 2, ("split",)),
    ],
)
def test_sanitizers_find_nothing(sanitized, program, n_ranks, args):
    env = {"NCCL_EMULATOR_DEADLOCK_S": "0.2", "NCCL_EMULATOR_CHUNK_BYTES": "1024"}
    outcomes = sanitized.outcomes(program, n_ranks, *args, env=env, timeout_s=30)
    for outcome in outcomes:
        assert outcome.error is None, outcome
        assert outcome.exit_code == 0, outcome
        assert "Sanitizer" not in outcome.stderr
        assert "runtime error" not in outcome.stderr


def test_the_sanitizer_sees_a_buffer_that_is_too_short(sanitized):
    (outcome,) = sanitized.outcomes(overrun.too_short, 1)
    assert outcome.exit_code != 0
    assert "heap-buffer-overflow" in outcome.stderr


def test_lives_of_communicators_leave_no_memory(tmp_path):
    if not _sanitizer("asan"):
        pytest.skip("the compiler has no AddressSanitizer")
    folder = emulator_build.build("asan")
    program = tmp_path / "lives"
    subprocess.run(
        [
            emulator_build.find_compiler("host"),
            *emulator_build.OPTIONS,
            *emulator_build.SANITIZERS,
            f"-I{emulator_build.SOURCES}",
            str(HERE / "programs" / "lives.c"),
            str(folder / emulator_build.LIBRARY),
            f"-Wl,-rpath,{folder}",
            "-o",
            str(program),
        ],
        check=True,
        timeout=60,
    )
    done = subprocess.run(
        [str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@needs_nvcc
def test_the_cuda_build_compiles_and_offers_the_same():
    library = emulator_build.build("cuda") / emulator_build.LIBRARY
    assert exported(library) == exported(emulator_build.build() / library.name)
    dynamic = subprocess.check_output(["readelf", "-d", str(library)], text=True)
    assert "soname: [libnccl.so.2]" in dynamic
    assert "libcudart" not in dynamic
    # It loads without a driver, and says that there is no device when one is needed.
    loaded = Library(library.parent)
    assert loaded.functions.ncclEmulatorMemory() == b"device"
    if shutil.which("nvidia-smi"):
        pytest.skip("the rest is for machines without a GPU")
    comm = loaded.init(1, loaded.unique_id(), 0)
    with pytest.raises(NcclFailure, match="returned 1: "):
        loaded.call("AllReduce", 64, 64, 4, 7, 0, comm.handle, None)
    comm.destroy()


def _cuda_include() -> str:
    command = [emulator_build.find_compiler("cuda"), "--dryrun", "-c", "-x", "cu", "-"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
        check=False,
    )
    return re.search(r'INCLUDES="-I([^"]+)"', done.stdout)[1]


@needs_nvcc
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_copies_of_the_cuda_build_are_in_the_order_of_the_stream(
    pretended_device, n_ranks
):
    for count in (1, 5000):
        found = pretended_device.run(
            device_memory.every_operation,
            n_ranks,
            count,
            env={"NCCL_EMULATOR_CHUNK_BYTES": "1024"},
        )
        assert found == ["device"] * n_ranks


@pytest.fixture(scope="module")
def pretended_device(tmp_path_factory):
    """Starts ranks on the CUDA build over a pretended CUDA runtime on host memory."""
    folder = tmp_path_factory.mktemp("pretended_cuda")
    subprocess.run(
        [
            emulator_build.find_compiler("host"),
            *emulator_build.OPTIONS,
            "-O0",
            "-shared",
            f"-I{_cuda_include()}",
            f"-I{emulator_build.SOURCES}",
            *map(str, emulator_build.sources("cuda")),
            str(HERE / "programs" / "pretended_cuda.c"),
            "-o",
            str(folder / emulator_build.LIBRARY),
        ],
        check=True,
        timeout=60,
    )
    with RankServer(folder) as running:
        yield running
