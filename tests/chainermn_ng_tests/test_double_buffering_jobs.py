"""Double buffering in whole programs: how they end with a gradient in flight."""

import pytest
from helpers.jobs import run_job

HEAD = """
import gc, os, signal, sys, time
import numpy as np
import chainermn_ng
import chainer
import chainer.links as L
from communicators import CommunicatorError

comm = chainermn_ng.create_communicator("flat", timeout_s={timeout_s})
model = L.Classifier(L.Linear(2, 2))
optimizer = chainermn_ng.create_multi_node_optimizer(
    chainer.optimizers.SGD(0.1), comm, double_buffering=True
).setup(model)

def step(loss=model):
    optimizer.update(loss, np.ones((1, 2), "f"), np.zeros(1, "i"))

def in_the_background(function):
    engine = comm.background("test").engine
    reduce = engine.allreduce_arrays
    engine.allreduce_arrays = lambda *args, **kwargs: function(reduce, *args, **kwargs)

def slowly(reduce, *args, **kwargs):
    time.sleep(1)
    return reduce(*args, **kwargs)

def say(text):
    # One write: a line and its end may be parted by another rank's.
    os.write(1, f"{{text}}\\n".encode())

def report(call):
    try:
        call()
    except CommunicatorError as error:
        say(f"[{{comm.rank}}] {{type(error).__name__}}: {{error}}")
"""
LOST = "optimizer 0 (SGD), gradient 2 was computed but never applied"


def run(body, n_ranks=2, timeout_s=20, head=""):
    code = head + HEAD.format(timeout_s=timeout_s) + body
    return run_job(n_ranks, ["-c", code], timeout_s=60)


@pytest.mark.parametrize(
    ("n_ranks", "slow"), [(1, ""), (2, "in_the_background(slowly)"), (3, "")]
)
def test_all_ranks_end_with_a_gradient_in_flight(n_ranks, slow):
    job = run(f"{slow}\nstep(); step()", n_ranks)
    assert job.returncode == 0, job.output
    assert job.stderr.count(LOST) == 1, job.output
    assert "Traceback" not in job.stderr, job.output
    assert job.seconds < 30


@pytest.mark.parametrize(
    "ending",
    [
        "optimizer.flush()",
        "chainer.serializers.save_npz(os.devnull, optimizer)",
        "comm.finalize(); chainer.serializers.save_npz(os.devnull, optimizer)",
    ],
)
def test_what_is_applied_or_saved_is_not_lost(ending):
    job = run(f"step(); step(); {ending}")
    assert job.returncode == 0, job.output
    assert job.stderr == "", job.output


def test_an_optimizer_that_goes_away_warns_at_once():
    job = run(
        """
step(); step()
del optimizer
gc.collect()
comm.barrier()
os.write(2, b"the end\\n")
"""
    )
    assert job.returncode == 0, job.output
    assert job.stderr.count(LOST) == 1, job.output
    assert job.stderr.index(LOST) < job.stderr.index("the end"), job.output


@pytest.mark.parametrize("slow", ["", "in_the_background(slowly)"])
def test_one_rank_ends_with_a_gradient_in_flight(slow):
    job = run(
        f"""
{slow}
step(); step()
if comm.rank == 0:
    report(step)
    report(optimizer.flush)
"""
    )
    assert job.returncode == 0, job.output
    for what in ("average gradient 3, apply gradient 2", "flush: apply gradient 2"):
        assert f"rank 0: optimizer 0 (SGD), {what}" in job.stdout, job.output
    assert job.stdout.count("[0] MismatchError") == 2, job.output
    assert job.stdout.count("rank 1: leaving the program") == 2, job.output
    assert job.seconds < 30


def test_one_rank_ends_before_its_average_begins():
    """The others' threads wait for it; its end tells them."""
    job = run(
        """
step()
optimizer.flush()
if comm.rank == 1:
    comm.background("").submit = lambda function: sys.exit(0)
step()
report(optimizer.flush)
"""
    )
    assert "average of gradient 2 in the background" in job.stdout, job.output
    assert "rank 1: leaving the program" in job.stdout, job.output
    assert job.returncode == 0, job.output
    assert job.seconds < 30


def test_an_exception_in_one_ranks_loss_ends_the_job():
    job = run(
        """
def broken(x, t):
    raise ValueError("broken")
in_the_background(slowly)
step(); step()
step(broken if comm.rank == 1 else model)
"""
    )
    assert job.returncode == 1, job.output
    assert job.stderr.count("ValueError: broken\n") >= 1, job.output
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.output
    assert job.seconds < 30


def test_a_rank_that_is_killed_ends_the_job():
    job = run(
        """
def loss(x, t):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return model(x, t)
in_the_background(slowly)
step()
step(loss)
"""
    )
    assert job.returncode != 0, job.output
    assert job.seconds < 30


def test_a_time_out_in_the_background_is_raised_by_the_next_call():
    job = run(
        """
if comm.rank == 1:
    in_the_background(lambda reduce, arrays, **_: time.sleep(6) or list(arrays))
else:
    comm.background("test")
step()
if comm.rank == 0:
    report(optimizer.flush)
    say(f"in flight: {optimizer.has_gradient_in_flight}")
""",
        timeout_s=1,
    )
    text = "[0] CommunicationTimeoutError: optimizer 0 (SGD), average of gradient 1 in"
    assert text in job.stdout, job.output
    assert "ranks [1] of 2 did not come within 1 s" in job.stdout, job.output
    assert "in flight: False" in job.stdout, job.output
    assert job.returncode != 0, job.output
    assert job.seconds < 30


def test_an_mpi_that_does_not_take_several_threads_is_refused():
    head = "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n"
    job = run("say(comm.engine.thread_level); report(step)", 2, head=head)
    if "multiple" in job.stdout:
        pytest.skip("this MPI library gives more than it is asked for")
    assert job.returncode == 0, job.output
    assert job.stdout.count("UnavailableError: optimizer 0 (SGD), start the") == 2
    assert job.stdout.count("MPI_THREAD_SERIALIZED") >= 2, job.output


def test_without_double_buffering_one_thread_is_enough():
    head = "import mpi4py; mpi4py.rc.thread_level = 'single'\n"
    job = run(
        """
optimizer = chainermn_ng.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
optimizer.setup(model)
step()
say(optimizer.t)
""",
        head=head,
    )
    assert (job.returncode, job.stdout.split()) == (0, ["1", "1"]), job.output
