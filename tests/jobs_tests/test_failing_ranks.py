"""A rank that fails ends the whole job, soon, with its traceback and a status."""

from __future__ import annotations

import pytest
from helpers.jobs import run_job

# 10 s for the end, and as many for the start of Python on a busy machine.
LIMIT_S = 20.0
PROLOGUE = """
import sys, threading, time
import chainermn_ng
"""
PEER_WAITS = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.rank == 1:
    {failure}
comm.barrier()
"""


def run(code, n_ranks=2, env=None, launcher=False):
    argv = ["-m", "chainermn_ng"] if launcher else []
    return run_job(n_ranks, [*argv, "-c", PROLOGUE + code], timeout_s=60, env=env)


def assert_ended(
    result, status=1, traceback="ValueError: broken", rank=1, limit_s=LIMIT_S
):
    assert result.returncode == status, result.output
    assert result.seconds < limit_s, result.output
    assert result.stderr.count(traceback + "\n") >= 1, result.output
    assert result.stderr.count("Traceback (most recent call last)") == 1, result.output
    assert f"rank {rank} of 2 on " in result.stderr, result.output


@pytest.mark.reports("chainer/chainermn#236", "mpi4py/mpi4py#290", "NanoComp/meep#1180")
def test_exception_on_one_rank_ends_the_job():
    assert_ended(run(PEER_WAITS.format(failure="raise ValueError('broken')")))


def test_output_printed_before_the_failure_is_not_lost():
    code = PEER_WAITS.format(failure="print('last words'); raise ValueError('broken')")
    assert "last words" in run(code).stdout


def test_exception_before_mpi_starts_ends_the_job():
    result = run(
        """
import os
if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == 1:
    time.sleep(0.5)
    raise ValueError("broken")
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
"""
    )
    # Open MPI's mpiexec may itself crash when a rank leaves while others start MPI.
    assert result.returncode != 0
    assert result.seconds < LIMIT_S
    assert "ValueError: broken" in result.stderr
    assert "rank 1 of 2" in result.stderr


def test_exception_where_no_rank_ever_starts_mpi_ends_the_job():
    result = run(
        """
import os
if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == 1:
    raise ValueError("broken")
time.sleep(50)
"""
    )
    assert_ended(result)


def test_exception_in_a_thread_ends_the_job():
    failure = """
    def work():
        raise ValueError("broken")
    threading.Thread(target=work).start()
    time.sleep(50)
"""
    assert_ended(run(PEER_WAITS.format(failure=failure)))


def test_exception_in_a_thread_before_mpi_starts_ends_the_job():
    result = run(
        """
import os
def work():
    raise ValueError("broken")
if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))) == 1:
    threading.Thread(target=work).start()
time.sleep(50)
"""
    )
    assert_ended(result)


def test_hook_of_the_user_is_called_first_and_once():
    code = """
import importlib
def hook(*args):
    print("user's hook", flush=True)
sys.excepthook = hook
chainermn_ng.global_except_hook.add_hook()
chainermn_ng.global_except_hook.add_hook()
"""
    result = run(code + PEER_WAITS.format(failure="raise ValueError('broken')"))
    assert result.returncode == 1, result.output
    assert result.stdout.count("user's hook") == 1, result.output
    assert "Traceback" not in result.stderr, result.output
    assert "uncaught ValueError: broken" in result.stderr, result.output


def test_hooks_that_call_each_other_end():
    # Theirs calls ours; add_hook, called once more, makes ours call theirs.
    code = """
theirs_calls = sys.excepthook
def hook(*error):
    theirs_calls(*error)
sys.excepthook = hook
chainermn_ng.global_except_hook.add_hook()
"""
    failure = "raise ValueError('broken')"
    assert_ended(run(code + PEER_WAITS.format(failure=failure)))


EXITS = """
comm = chainermn_ng.create_communicator("naive", timeout_s=30)
if comm.rank == 1:
    {exit}
comm.barrier()
"""


@pytest.mark.reports("mpi4py/mpi4py#290")
@pytest.mark.parametrize(
    ("exit", "status", "text"),
    [
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("sys.exit(256)", 1, "sys.exit(256)"),
        ("sys.exit('no data')", 1, "no data"),
        ("import argparse; argparse.ArgumentParser().error('bad')", 2, "sys.exit(2)"),
        ("import os; os._exit(3)", 3, "os._exit(3)"),
    ],
)
def test_a_status_without_the_launcher_ends_the_job(exit, status, text):
    result = run(EXITS.format(exit=exit))
    assert result.returncode == status, result.output
    assert result.seconds < LIMIT_S, result.output
    assert text in result.stderr, result.output
    assert result.stderr.count("ends the job with status") == 1, result.output
    assert "rank 1 of 2 on " in result.stderr, result.output
    assert "Traceback" not in result.stderr, result.output


@pytest.mark.reports("mpi4py/mpi4py#290")
@pytest.mark.parametrize(
    "exit", ["raise SystemExit(3)", "sys.exit(0)", "import os; os._exit(0)"]
)
def test_a_rank_that_leaves_silently_is_named_by_the_others(exit):
    result = run(EXITS.format(exit=exit))
    assert_ended(
        result,
        traceback="rank 1: leaving the program; called from <string>:8",
        rank=0,
    )


@pytest.mark.parametrize(
    "exit",
    [
        """
    for end in (sys.exit, exit):
        try:
            end(3)
        except SystemExit as error:
            kept = error  # until Python ends
            import pickle
            assert type(pickle.loads(pickle.dumps(error))) is SystemExit
""",
        "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start()",
        "import _thread; _thread.start_new_thread(sys.exit, (3,)); time.sleep(1)",
    ],
)
def test_an_exit_that_ends_no_program_does_nothing(exit):
    result = run(EXITS.format(exit=exit))
    assert result.returncode == 0, result.output
    assert result.stderr == "", result.output


@pytest.mark.parametrize("exit", ["os._exit(0)", "sys.exit(0)", "sys.exit()"])
def test_all_ranks_leave_in_peace(exit):
    result = run(
        f"""
import os
comm = chainermn_ng.create_communicator("naive", timeout_s=30)
print("done")
{exit}
"""
    )
    assert result.returncode == 0, result.output
    assert result.stdout.count("done") == 2, result.output
    assert result.stderr == "", result.output


def test_an_error_of_all_ranks_is_printed_by_one():
    result = run(
        """
comm = chainermn_ng.create_communicator("naive", timeout_s=30)
if comm.rank == 1:
    comm.barrier()
else:
    comm.allreduce_obj(1)
"""
    )
    assert_ended(result, traceback="<string>:7 on rank 1", rank=0)


def test_what_failed_on_one_rank_is_printed_by_that_one():
    result = run(
        """
comm = chainermn_ng.create_communicator("naive", timeout_s=30)
comm.bcast_obj((lambda: 1) if comm.rank else 1, root=1)
"""
    )
    assert_ended(result, traceback="; called from <string>:6", rank=1)


def test_the_others_print_it_if_that_one_goes_on():
    result = run(
        """
comm = chainermn_ng.create_communicator("naive", timeout_s=30)
try:
    comm.allreduce_obj(1) if comm.rank else comm.barrier()
except RuntimeError if comm.rank == 0 else ():
    time.sleep(40)
"""
    )
    # Some seconds later, in which the other one might have ended the job.
    assert_ended(result, traceback="<string>:7", rank=1, limit_s=LIMIT_S)


def test_failing_hook_of_the_user_hides_nothing():
    code = """
def hook(*args):
    raise RuntimeError("hook fails too")
sys.excepthook = hook
chainermn_ng.global_except_hook.add_hook()
"""
    result = run(code + PEER_WAITS.format(failure="raise ValueError('broken')"))
    assert result.returncode == 1, result.output
    assert result.seconds < LIMIT_S
    assert "RuntimeError: hook fails too" in result.stderr
    assert "ValueError: broken" in result.stderr


def test_caught_exception_does_nothing():
    failure = """
    try:
        raise ValueError("broken")
    except ValueError:
        print("caught")
"""
    result = run(PEER_WAITS.format(failure=failure))
    assert result.returncode == 0, result.output
    assert "caught" in result.stdout
    assert "chainermn_ng:" not in result.stderr


def test_one_rank_fails_as_plain_python_does():
    result = run("raise ValueError('broken')", n_ranks=1)
    assert result.returncode == 1, result.output
    assert "chainermn_ng:" not in result.stderr
    assert result.stderr.count("Traceback") == 1


def test_variable_turns_the_hook_off():
    code = """
print(sys.excepthook is sys.__excepthook__)
chainermn_ng.global_except_hook.add_hook()
from mpi4py import MPI
comm = MPI.COMM_WORLD
def work():
    raise ValueError("broken")
thread = threading.Thread(target=work)
thread.start()
thread.join()
comm.barrier()
"""
    result = run(code, env={"CHAINERMN_NG_ABORT_ON_EXCEPTION": "0"})
    assert result.returncode == 0, result.output
    assert result.stdout.split() == ["True", "True"]


def test_old_variable_keeps_it_on():
    env = {
        "CHAINERMN_NG_ABORT_ON_EXCEPTION": "0",
        "CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "1",
    }
    assert_ended(run(PEER_WAITS.format(failure="raise ValueError('broken')"), env=env))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_process_never_ends_the_job(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        PROLOGUE
        + f"""
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads around

def fail():
    raise ValueError("in thread of worker")

def work():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise ValueError("in worker")

def main():
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    worker = multiprocessing.get_context({method!r}).Process(target=work)
    worker.start()
    worker.join()
    comm.barrier()
    sys.stdout.write(f"worker ended with {{worker.exitcode}}\\n")

if __name__ == "__main__":
    main()
"""
    )
    for argv in ([], ["-m", "chainermn_ng"]):
        result = run_job(2, [*argv, script], timeout_s=60)
        assert result.returncode == 0, result.output
        assert result.stdout.count("worker ended with 1") == 2, result.output
        assert result.stderr.count("ValueError: in worker") == 2, result.output
        assert "ValueError: in thread of worker" in result.stderr, result.output
        assert "chainermn_ng:" not in result.stderr, result.output


def test_program_started_by_a_rank_never_ends_the_job():
    code = """
import subprocess
command = [sys.executable, "-c", "import chainermn_ng; raise ValueError('child')"]
status = subprocess.run(command).returncode
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
sys.stdout.write(f"child ended with {status}\\n")
"""
    result = run(code)
    assert result.returncode == 0, result.output
    assert result.stdout.count("child ended with 1") == 2, result.output
