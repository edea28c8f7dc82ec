"""Jobs in which NCCL fails, hangs or is not what the ranks need: they end, saying why.

NumPy arrays travel by the emulated NCCL, which environment variables tell to fail.
"""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Mapping

import pytest
from helpers import nccl
from helpers.jobs import JobResult, run_job

TRAINING = """
import sys, time
import chainermn_ng as chainermn
import chainer
sys.path.insert(0, "tests")
from helpers.chainer_models import MLP, batches, part

comm = chainermn.create_communicator({name!r}, **{options!r})
model = MLP(seed=comm.rank)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
optimizer.setup(model)
for x, t in batches({n_steps}, 12):
    optimizer.update(model, *part(comm, (x, t)))
    print(f"step done {{time.time()}}\\n", end="", flush=True)
"""


def train(
    emulator: pathlib.Path,
    n_ranks: int = 3,
    name: str = "flat",
    n_steps: int = 10,
    options: Mapping[str, object] | None = None,
    **env: str,
) -> JobResult:
    """Train a small model over the emulated NCCL; a rank that raises ends the job."""
    nccl.need_package("cupy")
    program = TRAINING.format(name=name, options=dict(options or {}), n_steps=n_steps)
    return run_job(
        n_ranks,
        ["-c", program],
        timeout_s=60,
        env={
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "host",
            "CHAINERMN_NG_NCCL_BINDING": "cupy",
            **env,
        },
    )


def ended(job: JobResult, *texts: str, within_s: float = 20) -> None:
    """Expect that a job failed, soon, with these texts."""
    assert job.returncode != 0, job.output
    for text in texts:
        assert text in job.output, job.output
    assert job.seconds < within_s, job.output


@pytest.mark.parametrize("binding", ["cupy", "pynccl"])
def test_training_works_when_nothing_fails(binding, emulator):
    nccl.need_package(binding)
    job = train(emulator, CHAINERMN_NG_NCCL_BINDING=binding)
    assert job.returncode == 0, job.output
    assert job.stdout.count("step done") == 30, job.output


@pytest.mark.parametrize("name", ["flat", "pure_nccl", "naive"])
def test_an_error_in_the_middle_of_training_ends_the_job(name, emulator):
    job = train(emulator, name=name, NCCL_EMULATOR_FAIL="AllReduce:5:2@1")
    ended_at = time.time()
    ended(
        job,
        f"{name}: all-reduce of ",
        "NCCL operation",
        "in group world (rank 1 of 3)",
        "ncclAllReduce failed with NCCL's code 2",
        "NCCL_DEBUG",
    )
    # Without the time that Chainer takes to be imported.
    last_step = max(float(t) for t in re.findall(r"step done ([\d.]+)", job.stdout))
    assert ended_at - last_step < 10, job.output


def test_an_error_that_nccl_reports_later_ends_the_job(emulator):
    job = train(emulator, NCCL_EMULATOR_FAIL="AllReduce:5:6:async@2")
    ended(job, "ncclCommGetAsyncError", "code 6", "NCCL_DEBUG")


@pytest.mark.parametrize("call", ["ReduceScatter", "AllGather"])
def test_errors_of_grids_name_the_group(call, emulator):
    job = train(
        emulator,
        n_ranks=4,
        name="two_dimensional",
        options={"topology": "2x2"},
        NCCL_EMULATOR_FAIL=f"{call}:5:3@2",
    )
    ended(job, "two_dimensional: ", "in group int", f"nccl{call} failed")


def test_an_operation_that_never_ends_is_found_by_the_watchdog(emulator):
    job = train(emulator, options={"timeout_s": 3}, NCCL_EMULATOR_HANG="AllReduce:5@1")
    ended(job, "flat: all-reduce of ", "not complete after", "timeout_s=3")
    assert "in group world" in job.output


@pytest.mark.parametrize("call", ["GetUniqueId", "Init", "Split"])
def test_what_fails_in_the_set_up_ends_the_job(call, emulator):
    rank = 0 if call == "GetUniqueId" else 1
    job = train(
        emulator,
        name="multi_ring",
        n_ranks=2,
        n_steps=1,
        options={"topology": "2x1", "timeout_s": 20},
        NCCL_EMULATOR_FAIL=f"{call}:1:3" + (f"@{rank}" if call == "Split" else ""),
    )
    what = "set up NCCL" if call == "GetUniqueId" else "make the NCCL communicator of"
    ended(job, what, "code 3")


def test_different_versions_of_nccl_are_refused(emulator):
    program = """
import os
rank = int(os.environ["PMI_RANK"])
os.environ["NCCL_EMULATOR_VERSION"] = "22707" if rank else "22105"
import numpy as np
from communicators import MismatchError, create_communicator
comm = create_communicator("flat", timeout_s=20)
try:
    comm.allreduce(np.ones(3))
except MismatchError as error:
    assert "NCCL 2.21.5" in str(error) and "NCCL 2.27.7" in str(error), str(error)
    print("refused", flush=True)
"""
    nccl.need_package("cupy")
    env = {"LD_LIBRARY_PATH": str(emulator), "CHAINERMN_NG_NCCL_MEMORY": "host"}
    job = run_job(2, ["-c", program], timeout_s=60, env=env)
    assert job.returncode == 0, job.output
    assert job.stdout.count("refused") == 2, job.output


def test_nccl_that_reads_device_memory_is_not_given_host_memory(recorder):
    job = train(recorder, n_ranks=2, CHAINERMN_NG_NCCL_BINDING="pynccl")
    ended(job, "works on cuda memory, and the arrays are in", "on ranks 0, 1")


@pytest.mark.reports("chainer/chainermn#218", "chainer/chainer#6636", "cupy/cupy#975")
def test_finalize_twice_at_exit_and_after_an_error(emulator):
    program = """
import numpy as np
from communicators import NcclError, create_communicator
first = create_communicator("two_dimensional", topology="2x1")
first.allreduce(np.ones(3))
first.finalize()
first.finalize()
second = create_communicator("flat")     # left to the end of the program
second.allreduce(np.ones(3))
third = create_communicator("flat")
try:
    for _ in range(9):
        third.allreduce(np.ones(3))
except NcclError as error:
    print(f"failed {error.code}\\n", end="", flush=True)
third.finalize()
third.finalize()
"""
    nccl.need_package("cupy")
    env = {"LD_LIBRARY_PATH": str(emulator), "CHAINERMN_NG_NCCL_MEMORY": "host"}
    job = run_job(
        2,
        ["-c", program],
        timeout_s=60,
        env={**env, "NCCL_EMULATOR_FAIL": "AllReduce:6:1"},
    )
    assert job.stdout.count("failed 1") == 2, job.output
    assert "Traceback" not in job.output, job.output
    # Two ranks gave the third communicator up, so MPI cannot be finalised in peace.
    assert job.seconds < 20, job.output


LATE = """
import numpy as np
from communicators import create_communicator
comm = create_communicator("flat", timeout_s=20)
comm.allreduce(np.ones(3))
comm.allreduce(np.ones(3))
if {finalize}:
    comm.finalize()
"""


@pytest.mark.parametrize("finalize", [True, False])
def test_an_error_that_nccl_reports_after_the_last_operation(finalize, emulator):
    nccl.need_package("cupy")
    env = {
        "LD_LIBRARY_PATH": str(emulator),
        "CHAINERMN_NG_NCCL_MEMORY": "host",
        "NCCL_EMULATOR_FAIL": "AllReduce:2:6:async",
    }
    job = run_job(2, ["-c", LATE.format(finalize=finalize)], timeout_s=60, env=env)
    ended(job, "flat: all-reduce of 3 float64, NCCL operation 2", "code 6")


def test_a_device_that_fails_in_the_set_up_is_told_on_all_ranks(emulator):
    program = """
import numpy as np
from communicators import CommunicatorError, create_communicator
from communicators.devices.host import EmulatedDevice
comm = create_communicator("flat", timeout_s=20)
if comm.rank == 1:
    def fail(self):
        raise RuntimeError("no such device")
    EmulatedDevice.identity = fail
try:
    comm.allreduce(np.ones(3))
except CommunicatorError as error:
    assert "no such device" in str(error) and "rank 1" in str(error), error
    print("told\\n", end="", flush=True)
"""
    nccl.need_package("cupy")
    env = {"LD_LIBRARY_PATH": str(emulator), "CHAINERMN_NG_NCCL_MEMORY": "host"}
    job = run_job(2, ["-c", program], timeout_s=60, env=env)
    assert job.returncode == 0, job.output
    assert job.stdout.count("told") == 2, job.output


@pytest.mark.parametrize("name", ["flat", "naive", "pure_nccl", "auto"])
def test_no_room_at_the_first_reduction_is_an_error_on_all_ranks(name, emulator):
    program = f"""
import time
import numpy as np
from communicators import CommunicatorError, create_communicator
from communicators.devices.host import EmulatedDevice
comm = create_communicator("{name}", timeout_s=3)
def no_room(*args):
    raise MemoryError("no room")
if comm.rank == 1:
    EmulatedDevice.take = no_room
try:
    comm.allreduce_arrays([np.ones(1000)])
except (CommunicatorError, MemoryError) as error:
    print(f"{{type(error).__name__}}\\n", end="", flush=True)
comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
"""
    nccl.need_package("cupy")
    env = {"LD_LIBRARY_PATH": str(emulator), "CHAINERMN_NG_NCCL_MEMORY": "host"}
    job = run_job(2, ["-c", program], timeout_s=30, env=env)
    assert "MemoryError" in job.stdout, job.output
    assert job.stdout.count("Error") == 2, job.output


def test_who_waits_in_mpi_hears_what_nccl_said_on_another_rank(emulator):
    program = """
import time
import numpy as np
from communicators import CommunicatorError, NcclError, create_communicator
comm = create_communicator("non_cuda_aware", timeout_s=30, topology="2x1")
arrays = [np.ones(1000)]
comm.allreduce_arrays(arrays)
def fail(*args):
    raise NcclError("ncclAllReduce", 3, "no")
if comm.rank == 1:
    type(comm.intra.nccl.nccl).check_async_error = fail
try:
    comm.allreduce_arrays(arrays)
except CommunicatorError as error:
    print(f"{comm.rank} {error}\\n", end="", flush=True)
comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
"""
    nccl.need_package("cupy")
    env = {"LD_LIBRARY_PATH": str(emulator), "CHAINERMN_NG_NCCL_MEMORY": "host"}
    job = run_job(2, ["-c", program], timeout_s=60, env=env)
    told = "rank 1 stopped in the middle of it: NcclError: ncclAllReduce failed"
    assert job.stdout.count(told) == 1, job.output
    assert job.seconds < 20, job.output


def test_an_operation_that_is_refused_does_not_end_the_job_later(emulator):
    program = """
import time
import numpy as np
from communicators import create_communicator
comm = create_communicator("flat", timeout_s=2, allreduce_grad_dtype="bfloat16")
try:
    comm.allreduce_arrays([np.ones(3, "f4")])
except TypeError as error:
    print("refused\\n", end="", flush=True)
time.sleep(4)
"""
    nccl.need_package("pynccl")
    job = run_job(
        2,
        ["-c", program],
        timeout_s=60,
        env={
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "host",
            "CHAINERMN_NG_NCCL_BINDING": "pynccl",
            "NCCL_EMULATOR_VERSION": "20900",
        },
    )
    assert job.stdout.count("refused") == 2, job.output
    assert "not complete" not in job.output


@pytest.mark.parametrize(
    "variable", ["CHAINERMN_NG_NCCL_BINDING", "CHAINERMN_NG_NCCL_MEMORY"]
)
def test_variables_that_differ_or_are_wrong_on_one_rank(variable, emulator):
    program = f"""
import os
if os.environ["PMI_RANK"] == "1":
    os.environ["{variable}"] = "x"
from communicators import create_communicator
try:
    create_communicator("flat", timeout_s=20)
except ValueError as error:
    assert "{variable}" in str(error), error
    print("told\\n", end="", flush=True)
"""
    job = run_job(2, ["-c", program], timeout_s=60)
    assert job.stdout.count("told") == 2, job.output
    assert job.seconds < 15


def test_a_set_up_that_all_ranks_saw_fail_may_be_tried_again(emulator):
    program = """
import threading
import numpy as np
from communicators import CommunicatorError, create_communicator
comm = create_communicator("hierarchical", nccl_binding="pynccl", timeout_s=20)
try:
    comm.allreduce(np.ones(3))
except CommunicatorError as error:
    assert "GetUniqueId" in str(error), error
    print("failed\\n", end="", flush=True)
names = [thread.name for thread in threading.enumerate()]
assert not any("watchdog" in name for name in names), names
assert (comm.allreduce(np.ones(3)) == comm.size).all()
comm.finalize()
"""
    nccl.need_package("pynccl")
    job = run_job(
        2,
        ["-c", program],
        timeout_s=60,
        env={
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "host",
            "NCCL_EMULATOR_FAIL": "GetUniqueId:2:2@0",
        },
    )
    assert job.returncode == 0, job.output
    assert job.stdout.count("failed") == 2, job.output


MADE = """
import numpy as np
from communicators import create_communicator
comm = create_communicator({name!r}, topology="2x2")
comm.allreduce(np.ones(3))
comm.reduce_scatter(np.ones((comm.size, 2)))
comm.bcast(np.ones(3))
comm.allreduce_arrays([np.ones(3, "f4")])
comm.finalize()
"""


@pytest.mark.parametrize(
    ("name", "n_split"),
    [
        ("flat", 0),
        ("pure_nccl", 0),
        ("auto", 0),
        ("hierarchical", 2),
        ("two_dimensional", 2),
        ("multi_ring", 2),
        # In the host alone: between hosts there may be no NCCL.
        ("non_cuda_aware", None),
    ],
)
@pytest.mark.reports("chainer/chainermn#224", "cupy/cupy#7863")
def test_no_more_nccl_communicators_than_needed(name, n_split, emulator, tmp_path):
    nccl.need_package("cupy")
    job = run_job(
        4,
        ["-c", MADE.format(name=name)],
        timeout_s=60,
        env={
            "LD_LIBRARY_PATH": str(emulator),
            "CHAINERMN_NG_NCCL_MEMORY": "host",
            "NCCL_EMULATOR_LOG": str(tmp_path / "log"),
        },
    )
    assert job.returncode == 0, job.output
    logs = [path.read_text() for path in tmp_path.glob("log.*")]
    assert len(logs) == 4
    for log in logs:
        assert log.count("op=Init ") == 1
        assert log.count("op=Split ") == (n_split or 0)
        if n_split is None:
            assert " size=4 " not in log
