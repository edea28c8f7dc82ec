"""``chainermn-ng bench --device gpu``, on NumPy arrays by the emulated NCCL.

How it waits for real device arrays is tested in ``test_on_lazy_gpu.py``.
"""

from __future__ import annotations

from helpers import nccl
from helpers.jobs import run_job

from communicators.bench_results import read_results


def test_communicators_are_compared_on_device_arrays(emulator, tmp_path):
    nccl.need_package("cupy")
    chosen = ["-c", "auto", "-c", "pure_nccl", "-c", "non_cuda_aware"]
    job = run_job(
        2,
        [
            *("-W", "error", "-m", "chainermn_ng.cli", "bench", "--device", "gpu"),
            *("--sizes", "64KiB", "--repetitions", "2", "--warm-up", "1", *chosen),
            *("--json", tmp_path / "b.json"),
        ],
        timeout_s=100,
        env={
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "host",
            "CHAINERMN_NG_NCCL_BINDING": "",
        },
    )
    assert job.returncode == 0, job.output
    found = read_results(tmp_path / "b.json")
    assert found.machine["device"] == "gpu (emulated on host memory)"
    mpi, *others = found.rows
    assert mpi.skipped == "host memory only"
    assert [row.communicator for row in others] == chosen[1::2]
    assert all(len(row.times_s) == 2 for row in others), job.output
