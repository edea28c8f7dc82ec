"""The programs for a real GPU (tests/gpu_tests), as far as they run without one.

What moves device arrays runs on CuPy's lazy stand-in, what trains runs on NumPy arrays
that travel by the emulated NCCL. A typing error in them would else show on the rare
machine with a GPU.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pytest
from gpu_tests import results, steps
from helpers import nccl
from helpers.jobs import REPOSITORY, JobResult, run_job
from host_kernels import library

PATH = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The pack kernels, compiled for the host."""
    if reason := library.why_no_library():
        nccl.skip(reason)
    return library.build(tmp_path_factory.mktemp("kernels"))


def run(
    n_ranks: int, program: pathlib.Path, *argv: object, emulator: pathlib.Path, **env
) -> JobResult:
    """Run a program on so many ranks, with warnings as errors."""
    return run_job(
        n_ranks,
        ["-W", "error", str(program), *map(str, argv)],
        timeout_s=100,
        env={
            **PATH,
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "",
            "CHAINERMN_NG_NCCL_BINDING": "",
            **env,
        },
    )


def succeeded(job: JobResult) -> list[tuple[str, Sequence[str]]]:
    """Expect success; return the rows of the tables, and details under no name."""
    assert job.returncode == 0, job.output
    return list(results.read(job.stdout))


@pytest.mark.parametrize(
    ("n_ranks", "calls"),
    [
        (1, steps.calls_of_one_rank()),
        (2, steps.calls_of_two_ranks()),
        (4, steps.calls_of_four_ranks()),
    ],
    ids=["1", "2", "4"],
)
def test_what_is_called_on_a_shared_device(n_ranks, calls, kernels, emulator):
    nccl.need_package("pynccl")
    job = run(n_ranks, steps.ON_GPU, kernels, *calls, emulator=emulator)
    succeeded(job)
    assert job.stdout.count("done\n") == n_ranks, job.output


def test_the_kernels_are_checked(kernels, emulator):
    program = steps.PROGRAMS / "kernels.py"
    job = run(1, program, kernels, "check", 20, emulator=emulator)
    ((table, (detail,)),) = succeeded(job)
    assert table == ""
    assert detail.startswith(
        "820 cases bit for bit as NumPy's twin, 48 against float64"
    )


def test_the_kernels_are_timed(kernels, emulator):
    program = steps.PROGRAMS / "kernels.py"
    job = run(1, program, kernels, "measure", 1, 10, emulator=emulator)
    *rows, (_, (detail,)) = succeeded(job)
    assert {table for table, _ in rows} == {"bandwidth"}
    columns = steps.result_tables()["bandwidth"].columns
    assert all(len(cells) == len(columns) for _, cells in rows)
    what = [cells[0] for _, cells in rows]
    assert what[:2] == ["copy of one array", "copies, one an array"]
    assert "pack as bfloat16, scaled, 4 MiB buckets" in what
    assert rows[0][1][-1] == "1.00"
    assert detail.startswith("copy ")


def test_the_environment_is_described_and_what_is_missing_told(kernels, emulator):
    nccl.need_package("pynccl")
    program = steps.PROGRAMS / "environment.py"
    job = run(1, program, kernels, emulator=emulator)
    # The stand-in has no NCCL of its own.
    assert job.returncode == 1, job.output
    *rows, (_, (detail,)) = results.read(job.stdout)
    found = dict(cells for _, cells in rows)
    assert found["GPU"] == "lazy"
    assert found["CUDA of the driver"] == "13.0"
    assert "NCCL by pynccl" in found
    assert "CuPy's lazy stand-in has no NCCL" in detail


def on_host_memory(
    n_ranks: int, program: str, *argv: object, emulator: pathlib.Path
) -> list[tuple[str, Sequence[str]]]:
    """Run a program whose NumPy arrays travel by the emulated NCCL."""
    nccl.need_package("cupy")
    job = run(
        n_ranks,
        steps.PROGRAMS / program,
        "cpu",
        *argv,
        emulator=emulator,
        CHAINERMN_NG_NCCL_MEMORY="host",
    )
    return succeeded(job)


@pytest.mark.parametrize(
    ("n_ranks", "wire", "options"),
    [(1, "float16", []), (2, "float32", ["--double-buffering"])],
)
def test_the_example_is_trained(n_ranks, wire, options, emulator):
    pytest.importorskip("sklearn")
    argv = (wire, *options)
    rows = on_host_memory(n_ranks, "train_digits.py", *argv, emulator=emulator)
    (name, cells), (_, (detail,)) = rows
    assert name == "training"
    assert len(cells) == len(steps.result_tables()[name].columns)
    is_double = "yes" if options else "no"
    assert cells[:4] == [str(n_ranks), "emulated", wire, is_double]
    assert float(cells[4]) >= 0.95
    assert detail == f"accuracy {cells[4]}"


def test_a_step_is_profiled(emulator):
    rows = on_host_memory(1, "profile_step.py", 3, 40, emulator=emulator)
    *phases, (_, (detail,)) = rows
    by_phase = {cells[0]: cells[1:] for _, cells in phases}
    assert [*by_phase] == [
        *("forward", "backward", "agree", "pack", "NCCL", "unpack", "update"),
        "whole step",
    ]
    # Without a device there are no events.
    assert all(device == "-" for _, device in by_phase.values())
    host = {phase: float(ms) for phase, (ms, _) in by_phase.items()}
    assert all(ms > 0 for ms in host.values()), host
    parts = sum(ms for phase, ms in host.items() if phase != "whole step")
    assert parts <= 1.2 * host["whole step"]
    assert "MB of gradients, batch 256" in detail


def test_chainer_is_compared_with_itself(emulator):
    ((_, (detail,)),) = on_host_memory(1, "chainer_on_gpu.py", emulator=emulator)
    assert detail == "22 functions, 5 optimizers as on NumPy"


def test_every_program_is_run_by_a_test_above():
    programs = {path.name for path in steps.PROGRAMS.glob("[a-z]*.py")}
    text = pathlib.Path(__file__).read_text()
    assert all(f'"{name}"' in text for name in programs), programs
