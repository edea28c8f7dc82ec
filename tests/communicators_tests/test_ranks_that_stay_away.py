"""Ranks that skip, leave, die or dawdle end the wait of the others: whole jobs."""

from __future__ import annotations

import pytest
from helpers.jobs import run_job

PRELUDE = """
import os, signal, sys, time
import numpy as np
from communicators import CommunicatorError, create_communicator
comm = create_communicator("flat", timeout_s={timeout_s})
rank = comm.rank
def report(call):
    try:
        call()
    except CommunicatorError as error:
        # One write a line, so that ranks do not mix.
        os.write(1, f"[{{rank}}] {{type(error).__name__}}: {{error}}\\n".encode())
"""


def run(n_ranks: int, body: str, timeout_s: float = 30.0):
    code = PRELUDE.format(timeout_s=timeout_s) + body
    return run_job(n_ranks, ["-c", code], timeout_s=60)


def test_a_rank_that_leaves_the_program_is_named_at_once():
    job = run(
        3,
        """
if rank != 1:
    for _ in range(2):      # each of their collectives fails at once
        report(lambda: comm.allreduce_obj(1))
        report(lambda: comm.allreduce(np.ones(3)))
""",
    )
    assert job.returncode == 0, job.output
    assert job.stdout.count("rank 1: leaving the program") == 8, job.output
    assert job.seconds < 20


def test_all_ranks_leaving_together_is_silent():
    job = run(3, "comm.barrier(); comm.split(rank % 2, 0)")
    assert (job.returncode, job.stdout) == (0, ""), job.output


def test_a_rank_that_does_not_come_is_named_after_the_time_limit():
    job = run(
        3,
        """
if rank == 1:
    time.sleep(25)
report(lambda: comm.bcast_obj("x"))
""",
        timeout_s=2.0,
    )
    assert job.returncode != 0, job.output
    texts = [line for line in job.stdout.splitlines() if "Timeout" in line]
    assert len(texts) >= 1, job.output
    for text in texts:
        assert "bcast_obj (collective 3): ranks [1] of 3 did not come" in text
    assert job.seconds < 20, job.output


def test_a_late_rank_hears_that_the_others_gave_up():
    job = run(
        2,
        """
if rank == 1:
    time.sleep(6)
report(comm.barrier)
time.sleep(4)
""",
        timeout_s=1.0,
    )
    assert "[0] CommunicationTimeoutError: barrier" in job.stdout, job.output
    assert "[1] CommunicationTimeoutError: barrier" in job.stdout, job.output
    assert job.returncode != 0


def test_a_message_that_never_comes_times_out():
    body = "time.sleep(4 * rank); report(lambda: rank or comm.recv(1, tag=4))"
    job = run(2, body, timeout_s=1.0)
    assert "recv on rank 0 from rank 1 (tag 4): nothing came" in job.stdout, job.output
    assert "; called from <string>:" in job.stdout, job.output


def test_a_message_that_nobody_takes_times_out():
    # Larger than what MPI sends without the receiver.
    body = "report(lambda: rank or comm.send(np.zeros(10**7), 1, tag=4)); time.sleep(2)"
    job = run(2, body, timeout_s=1.0)
    assert "send from rank 0 to rank 1 (tag 4): not complete" in job.stdout, job.output
    assert job.seconds < 20, job.output


def test_ranks_that_wait_for_each_other_are_told_where():
    job = run(
        2,
        """
time.sleep(1 - rank)
report(lambda: comm.barrier() if rank else comm.recv(1, tag=4))
""",
        timeout_s=2.0,
    )
    texts = [line for line in job.stdout.splitlines() if "not for the same" in line]
    assert len(texts) >= 1, job.output
    for text in texts:
        assert "ranks [0] in recv on rank 0 from rank 1 (tag 4) at <string>:" in text
        assert "ranks [1] in barrier (collective 3) at <string>:" in text
    assert job.seconds < 20, job.output


@pytest.mark.parametrize(
    "call", ["allreduce(np.ones(9))", "alltoall([np.ones(9)] * 3)", "bcast_obj(1)"]
)
def test_a_rank_that_stops_in_the_middle_is_named(call):
    job = run(
        3,
        f"""
comm.allreduce(np.ones(9))  # makes what is made at the first use
from communicators.agreement import Agreement
agree = Agreement.check
def agree_and_stop(self, *args, **options):
    try:
        return agree(self, *args, **options)
    finally:
        os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    Agreement.check = agree_and_stop
report(lambda: comm.{call})
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
comm.mpi_comm.Abort(3)
""",
        timeout_s=2.0,
    )
    texts = [line for line in job.stdout.splitlines() if "Timeout" in line]
    assert len(texts) >= 1, job.output
    for text in texts:
        assert call.partition("(")[0] in text, job.output
        assert "ranks [1] of 3 " in text, job.output
    assert job.seconds < 20, job.output


@pytest.mark.parametrize(
    "call", ["allreduce(np.ones(100000))", "allgather_obj(1)", "barrier()"]
)
def test_a_killed_rank_ends_the_job(call):
    job = run(
        3,
        f"""
for step in range(10**6):
    if rank == 1 and step == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.{call}
""",
    )
    assert job.returncode != 0, job.output
    assert job.seconds < 20, job.output


def test_two_communicators_at_the_end_of_the_program():
    job = run(
        2,
        """
other = create_communicator("naive")
if rank == 0:
    report(lambda: other.allreduce_obj(1))
    report(lambda: comm.allreduce_obj(1))
""",
    )
    assert job.returncode == 0, job.output
    assert job.stdout.count("rank 1: leaving the program") == 2, job.output


def test_a_forked_child_leaves_quietly():
    job = run(
        2,
        """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(0,))
child.start()
child.join()
comm.barrier()
assert child.exitcode == 0
""",
    )
    assert job.returncode == 0, job.output


@pytest.mark.parametrize("call", ["recv(1)", "recv_obj(1, tag=7)"])
def test_a_rank_that_leaves_ends_the_wait_for_its_message(call):
    job = run(2, f"report(lambda: rank or comm.{call})", timeout_s=300.0)
    assert "rank 1 has left the program" in job.stdout, job.output
    assert job.returncode == 0, job.output
    assert job.seconds < 20, job.output


def test_a_message_sent_before_leaving_arrives():
    job = run(
        2,
        """
if rank == 1:
    comm.send_obj("farewell", 0)
else:
    time.sleep(2)
    print(comm.recv_obj(1))
""",
    )
    assert (job.returncode, job.stdout) == (0, "farewell\n"), job.output


def test_a_rank_that_creates_no_communicator_does_not_hang_the_others():
    job = run(
        2,
        """
if rank == 1:
    time.sleep(6)
report(lambda: create_communicator("naive", timeout_s=2.0))
""",
    )
    assert "CommunicationTimeoutError: create_communicator" in job.stdout, job.output
    assert job.returncode != 0, job.output
    assert job.seconds < 20, job.output


def test_a_rank_that_is_leaving_is_not_named_as_missing():
    job = run(
        3,
        """
if rank == 0:
    time.sleep(8)
elif rank == 2:
    report(lambda: comm.allreduce_obj(1))
""",
        timeout_s=2.0,
    )
    assert "ranks [0] of 3 did not come" in job.stdout, job.output
    assert job.seconds < 20, job.output


@pytest.mark.parametrize(
    ("name", "who"),
    [("two_dimensional", (0, 1)), ("hierarchical", (1,)), ("auto", (1,))],
)
def test_after_an_error_in_the_middle_a_communicator_is_unusable(name, who):
    job = run(
        2,
        f"""
from communicators.devices import host
comm = create_communicator(
    "{name}", topology="2x1", timeout_s=50.0, bucket_bytes=4096
)
arrays = [np.full(3000, rank + 1.0) for _ in range(4)]
comm.allreduce_arrays(arrays)
pack = host.pack
def pack_some(bucket, *args):
    if bucket.indices[0] == 2:
        raise MemoryError("no room")
    pack(bucket, *args)
if rank in {who}:
    host.pack = pack_some
try:
    comm.allreduce_arrays(arrays)
except MemoryError:
    pass
except CommunicatorError as error:
    print(rank, "heard", error)
host.pack = pack
assert not comm.is_usable
for _ in range(2):
    report(lambda: comm.allreduce_arrays(arrays))
comm.finalize()
comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
""",
    )
    title = "allreduce_arrays, mean, on the wire None (collective 4)"
    heard = f"{title}: rank 1 stopped in the middle of it: MemoryError: no room"
    assert job.stdout.count(heard) == 2 - len(who), job.output
    text = "this communicator is unusable after an earlier time-out, or an error in"
    assert job.stdout.count(text) == 4, job.output
    assert "given up" in job.stderr, job.output
    assert job.seconds < 20, job.output


# Where memory gives out on one rank; the operation that the others wait in.
NO_ROOM = {
    "allreduce": "array_reductions._accumulator",
    "reduce_scatter": "array_reductions._accumulator",
    "allgather": "roads.MpiRoad.empty",
    "allgather_obj": "object_collectives.np",
    "allreduce_arrays": "transports.same_host.reduce_blocks",
}


@pytest.mark.parametrize("call", NO_ROOM)
def test_the_others_hear_at_once_why_a_rank_does_not_go_on(call):
    what = "[np.ones(200_000)]" if call == "allreduce_arrays" else "np.ones((3, 5))"
    job = run(
        3,
        f"""
import pkgutil
class Broken(MemoryError):
    def __str__(self):
        if "{call}" == "allgather":
            raise KeyError("the text")
        return "no room"
class NoRoom:
    def __getattr__(self, name):
        return self if name == "empty" else getattr(np, name)
    def __call__(self, *args, **options):
        raise Broken
comm.{call}({what})
if rank == 1:
    holder, _, name = "communicators.{NO_ROOM[call]}".rpartition(".")
    setattr(pkgutil.resolve_name(holder), name, NoRoom())
for _ in range(2):
    try:
        report(lambda: comm.{call}({what}))
    except MemoryError:
        pass
comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
""",
    )
    text = "(an error without a text)" if call == "allgather" else "no room"
    title = "allreduce_arrays, mean, on the wire None" if "arrays" in call else call
    heard = f"rank 1 stopped in the middle of it: Broken: {text}; called from <string>:"
    lines = [line for line in job.stdout.splitlines() if heard in line]
    assert len(lines) == 2, job.output
    assert all(f"] RankFailedError: {title} (collective" in line for line in lines), (
        lines
    )
    assert job.stdout.count("this communicator is unusable") == 3, job.output
    assert job.seconds < 20, job.output


@pytest.mark.parametrize(
    ("call", "place"),
    [("bcast", "roads.MpiRoad.empty"), ("bcast_obj", "object_collectives.np")],
)
def test_after_a_lone_error_no_data_are_those_of_another_call(call, place):
    job = run(
        3,
        f"""
import pkgutil
class NoRoom:
    def __getattr__(self, name):
        return self if name == "empty" else getattr(np, name)
    def __call__(self, *args, **options):
        raise MemoryError("no room")
if rank == 1:
    holder, _, name = "communicators.{place}".rpartition(".")
    had = getattr(pkgutil.resolve_name(holder), name)
    setattr(pkgutil.resolve_name(holder), name, NoRoom())
def get(i):
    got = comm.{call}(np.full(4, i) if rank == 0 else None)
    assert (got == i).all(), (i, got)
for i in range(3):
    try:
        report(lambda: get(i))
    except MemoryError:
        setattr(pkgutil.resolve_name(holder), name, had)
    comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
""",
    )
    assert "AssertionError" not in job.output, job.output
    heard = "rank 1 stopped in the middle of it: MemoryError: no room"
    assert job.stdout.count(heard) == 2, job.output
    assert job.seconds < 20, job.output


def test_auto_that_remembers_hears_why_a_rank_does_not_go_on(tmp_path):
    job = run(
        2,
        f"""
os.environ["CHAINERMN_NG_AUTO_CACHE"] = "{tmp_path / "auto.json"}"
from communicators import many_arrays
whole = np.ones(100_000)
def reduce():
    comm = create_communicator("auto", topology="2x1", timeout_s=30)
    # They overlap, so they are copied first.
    comm.allreduce_arrays([whole[:60_000], whole[50_000:]])
    comm.finalize()
reduce()
def no_room(*args):
    raise MemoryError("no room")
if rank == 1:
    many_arrays.overlapping = no_room
try:
    report(reduce)
except MemoryError:
    pass
comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
""",
    )
    heard = "rank 1 stopped in the middle of it: MemoryError: no room"
    assert job.stdout.count(heard) == 1, job.output
    assert "allreduce_arrays, mean" in job.stdout, job.output
    assert job.seconds < 20, job.output


def test_what_a_thread_does_in_the_background_goes_on_after_an_error():
    job = run(
        2,
        """
import threading
from communicators import array_reductions
from chainermn_ng.communicators.background import Background
comm = create_communicator("flat", topology="2x1", timeout_s=30, bucket_bytes=4096)
background = Background(comm, "background")
arrays = [np.full(100_000, rank + 1.0) for _ in range(20)]
begun = threading.Event()
def work():
    begun.set()
    background.engine.allreduce_arrays(arrays)
comm.allreduce(np.ones(3))
def no_room(*args):
    raise MemoryError("no room")
if rank == 1:
    array_reductions._accumulator = no_room
future = background.submit(work)
begun.wait()
try:
    report(lambda: comm.allreduce(np.ones(3)))
except MemoryError:
    pass
future.result()
assert all((array == 1.5).all() for array in arrays)
assert background.engine.is_usable and not comm.is_usable
print("averaged\\n", end="", flush=True)
comm.mpi_comm.Barrier()  # the first to leave ends the job
time.sleep(1)  # MPICH's mpiexec may drop what was written just before an abort
""",
    )
    assert job.stdout.count("averaged") == 2, job.output
