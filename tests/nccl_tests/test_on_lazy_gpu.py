"""The engine's code for GPUs, on CuPy's lazy stand-in and the emulated NCCL.

Whatever is enqueued happens as late as it may, so an event or a wait that is missing
gives wrong numbers (see :mod:`helpers.lazy_cupy`).
"""

from __future__ import annotations

import pathlib
import re

import pytest
from helpers import nccl
from helpers.jobs import JobResult, run_job
from host_kernels import library

PROGRAM = pathlib.Path(__file__).parent / "programs" / "on_lazy_gpu.py"

pytestmark = pytest.mark.skipif(
    library.why_no_library() is not None, reason=str(library.why_no_library())
)

NAMES = [
    "auto",
    "flat",
    "hierarchical",
    "multi_ring",
    "naive",
    "non_cuda_aware",
    "pure_nccl",
    "two_dimensional",
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The pack kernels, compiled for the host."""
    return library.build(tmp_path_factory.mktemp("kernels"))


def run(
    n_ranks: int, kernels: pathlib.Path, emulator: pathlib.Path, *argv: str, **env: str
) -> JobResult:
    """Run a function of the program on so many ranks."""
    nccl.need_package("pynccl")
    return run_job(
        n_ranks,
        [str(PROGRAM), str(kernels), *argv],
        timeout_s=60,
        # NumPy arrays travel by MPI here, also where the suite says otherwise.
        env={
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "",
            **env,
        },
    )


def succeeded(job: JobResult, n_ranks: int) -> JobResult:
    """Expect that every rank came to its end."""
    assert job.returncode == 0, job.output
    assert job.stdout.count("done") == n_ranks, job.output
    return job


# Starting a job takes longer than what it does: each does several things.


def joined(calls: list[list[str]]) -> list[str]:
    """Return the program's arguments for several functions."""
    words = [word for call in calls for word in ("--", *call)]
    return words[1:]


@pytest.mark.parametrize("early_nccl", ["0", "1"])
@pytest.mark.reports("mpi4py/mpi4py#60", "mpi4py/mpi4py#10")
def test_gradients_are_averaged_in_the_right_order_of_streams(
    early_nccl, kernels, emulator
):
    calls = [["allreduce_arrays", name, "topology=2x2"] for name in NAMES]
    env = {"LAZY_CUPY_EARLY_NCCL": early_nccl}
    succeeded(run(4, kernels, emulator, *joined(calls), **env), 4)


def test_wire_types(kernels, emulator):
    calls = [
        ["allreduce_arrays", name, f"allreduce_grad_dtype={wire}"]
        for name in NAMES
        for wire in ("float16", "bfloat16", "float64")
    ]
    succeeded(run(2, kernels, emulator, *joined(calls)), 2)


@pytest.mark.parametrize(
    ("version", "order", "n_streams"),
    [("22707", "1", 2), ("22500", "1", 1), ("22707", "0", 1)],
)
def test_chunks_overlap_where_nccl_keeps_communicators_in_order(
    version, order, n_streams, kernels, emulator
):
    env = {"NCCL_EMULATOR_VERSION": version, "NCCL_LAUNCH_ORDER_IMPLICIT": order}
    succeeded(run(4, kernels, emulator, "chunks", str(n_streams), **env), 4)


def test_one_launch_packs_a_bucket_and_one_unpacks_it(kernels, emulator):
    job = succeeded(run(2, kernels, emulator, "allreduce_arrays", "flat"), 2)
    # float32 and half precision travel as float32; float64 and complex by themselves:
    # 3 buckets, packed and unpacked, 5 steps.
    found = re.findall(r"launches (\d+) bytes (\d+)", job.stdout)
    assert [int(launches) for launches, _ in found] == [2 * 3 * 5] * 2, job.output
    float32 = (15 + 1200) * (4 + 4) + (7 + 18) * (2 + 4)
    float64 = 8 + 8
    complex64 = 6 * 8 * 2
    # Packed and unpacked.
    step = 2 * (float32 + float64 + complex64)
    assert [int(n_bytes) for _, n_bytes in found] == [5 * step] * 2, job.output


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_on_ranks(n_ranks, kernels, emulator):
    functions = ["array_collectives", "arrays_in_streams", "missing_arrays"]
    functions += ["refusals", "split", "bench"]
    argv = joined([[function] for function in functions])
    succeeded(run(n_ranks, kernels, emulator, *argv), n_ranks)


def test_array_collectives_of_one_rank(kernels, emulator):
    succeeded(run(1, kernels, emulator, "array_collectives"), 1)


def test_two_ranks_on_one_device_are_told_so_on_all_ranks(kernels, emulator):
    job = run(3, kernels, emulator, "same_device")
    assert job.returncode != 0
    last_lines = [
        line for line in job.stderr.splitlines() if "CommunicatorError: " in line
    ]
    assert len(last_lines) == 3, job.output
    for line in last_lines:
        assert "ranks 0, 1, 2 of one host all use cuda:0" in line
        assert "cupy.cuda.Device(comm.world_intra_rank).use()" in line
    assert job.seconds < 30


def test_the_watchdog_ends_a_job_whose_program_waits_elsewhere(kernels, emulator):
    job = run(2, kernels, emulator, "never_done")
    assert job.returncode != 0
    assert job.stdout.count("the call has returned") == 2, job.output
    assert "flat: all-reduce of 3 float32, NCCL operation 1, in group" in job.output
    assert "timeout_s=2); another rank may have failed" in job.output
    assert "ending the job" in job.output
    assert job.seconds < 20, job.output


def test_another_device_than_before_is_refused(kernels, emulator):
    succeeded(run(2, kernels, emulator, "other_device"), 2)
