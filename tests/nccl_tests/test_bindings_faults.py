"""Failing, hanging and too old libraries, in processes of their own."""

from __future__ import annotations

import textwrap

import pytest
from helpers import nccl

nccl.need_any_package()

START = """
    import numpy as np
    from mpi4py import MPI
    from communicators import NcclError, nccl_bindings

    world = MPI.COMM_WORLD
    binding = nccl_bindings.load({name!r})
    value = np.ones(1)
    pointer = value.ctypes.data

    def create():
        unique_id = world.bcast(binding.create_unique_id())
        return binding.init_rank(world.size, unique_id, world.rank)

    def all_reduce(comm):
        comm.all_reduce(pointer, pointer, 1, "float64", "sum", 0)

    def error_of(function, *args):
        try:
            function(*args)
        except NcclError as error:
            return error
        raise SystemExit("no error")
"""


def run(name, emulator, code, *, n_ranks=1, **env):
    """Run a program on the emulator; it has 20 seconds."""
    program = textwrap.dedent(START.format(name=name)) + textwrap.dedent(code)
    job = nccl.run_python(
        program, library=emulator, n_ranks=n_ranks, env=env, timeout_s=20
    )
    assert job.returncode == 0, job.output
    return job


@pytest.mark.parametrize("code", range(1, 8))
def test_a_failing_call_tells_its_code_and_name(name, emulator, code):
    run(
        name,
        emulator,
        f"""
        comm = create()
        all_reduce(comm)
        error = error_of(all_reduce, comm)
        assert (error.call, error.code) == ("ncclAllReduce", {code}), error
        assert "by order of NCCL_EMULATOR_FAIL" in str(error), error
        assert "rank 0 of 1" in str(error), error
        assert "NCCL_DEBUG=INFO" in str(error), error
        comm.abort()
        """,
        NCCL_EMULATOR_FAIL=f"AllReduce:2:{code}",
    )


@pytest.mark.parametrize(
    ("order", "call", "function"),
    [
        ("GetUniqueId:1:2", "ncclGetUniqueId", "create"),
        ("Init:1:3", "ncclCommInitRank", "create"),
        ("GroupEnd:1:5", "ncclGroupEnd", "group"),
    ],
)
def test_calls_without_a_communicator_fail_alike(name, emulator, order, call, function):
    run(
        name,
        emulator,
        f"""
        def group():
            binding.group_start()
            binding.group_end()

        error = error_of({function})
        assert (error.call, error.code) == ({call!r}, {order[-1]}), error
        assert "NCCL_DEBUG=INFO" in str(error), error
        """,
        NCCL_EMULATOR_FAIL=order,
    )


def test_an_error_that_comes_later_is_found(name, emulator):
    run(
        name,
        emulator,
        """
        comm = create()
        comm.check_async_error()
        all_reduce(comm)
        error = error_of(comm.check_async_error)
        assert (error.call, error.code) == ("ncclCommGetAsyncError", 6), error
        comm.abort()
        """,
        NCCL_EMULATOR_FAIL="AllReduce:1:6:async",
    )


ABORT_FROM_A_THREAD = """
    import threading, time

    def free_by_abort(comm):
        inside = threading.Event()

        def end():
            inside.wait()
            time.sleep(0.3)
            comm.abort()

        thread = threading.Thread(target=end)
        thread.start()
        inside.set()
        error = error_of(all_reduce, comm)
        assert error.call == "ncclAllReduce", error
        assert "the communicator has been aborted meanwhile" in str(error), error
        thread.join()
        comm.abort()
        comm.destroy()
        assert "has been aborted" in str(error_of(all_reduce, comm))

    comm = create()
"""


def test_a_hanging_call_ends_when_another_thread_aborts(name, emulator):
    code = textwrap.dedent(ABORT_FROM_A_THREAD) + "free_by_abort(comm)"
    job = run(name, emulator, code, NCCL_EMULATOR_HANG="AllReduce:1")
    assert job.seconds < 15, job.output


def test_a_call_that_waits_for_another_rank_ends_by_abort(name, emulator):
    code = textwrap.dedent(ABORT_FROM_A_THREAD) + textwrap.dedent(
        """
        if world.rank == 0:
            free_by_abort(comm)
            world.send("done", 1)
        else:
            world.recv(source=0)
            comm.abort()
        """
    )
    job = run(name, emulator, code, n_ranks=2)
    assert job.seconds < 15, job.output


def test_destroy_and_abort_may_come_twice(name, emulator):
    run(
        name,
        emulator,
        """
        for ends in (["destroy"] * 2, ["abort"] * 2, ["abort", "destroy"],
                     ["destroy", "abort"]):
            comm = create()
            all_reduce(comm)
            for end in ends:
                getattr(comm, end)()
        """,
        n_ranks=2,
    )


@pytest.mark.parametrize("version", [20705, 2708])
def test_a_library_that_is_too_old_is_refused(name, emulator, version):
    code = f"""
        from communicators import UnavailableError, nccl_bindings
        for _ in range(2):
            try:
                nccl_bindings.load({name!r})
            except UnavailableError as error:
                print(error)
            else:
                raise SystemExit("loaded")
    """
    job = nccl.run_python(
        code, library=emulator, env={"NCCL_EMULATOR_VERSION": str(version)}
    )
    assert job.returncode == 0, job.output
    known_as = "2.7.5" if version == 20705 else "2.7.8"
    assert job.stdout.count(f"NCCL {known_as} ({emulator}") == 2, job.output
    assert "2.8 or newer is needed" in job.stdout
    assert "pip install 'chainermn-ng[cuda13]'" in job.stdout


def test_the_oldest_library_is_accepted_and_what_it_lacks_refused(name, emulator):
    run(
        name,
        emulator,
        """
        assert (binding.version, binding.memory) == (2803, "host")
        assert not binding.has_split
        comm = create()
        for error, dtype, op in ((TypeError, "bfloat16", "sum"),
                                 (ValueError, "float32", "avg")):
            try:
                comm.all_reduce(pointer, pointer, 1, dtype, op, 0)
            except error as caught:
                assert "2.8.3 has no" in str(caught)
            else:
                raise SystemExit(f"{dtype}, {op} was accepted")
        comm.destroy()
        """,
        NCCL_EMULATOR_VERSION="2803",
    )


def test_the_check_command_names_the_library(emulator):
    nccl.need_package("cupy")
    code = """
        from chainermn_ng import check
        check.main(["--mbytes", "1"])
    """
    job = nccl.run_python(code, library=emulator, n_ranks=2, timeout_s=60)
    assert job.returncode == 0, job.output
    for name in ("cupy", "pynccl"):
        assert f"NCCL:     binding '{name}' with NCCL 2.27.7 ({emulator}" in job.stdout
    assert job.stdout.count("an emulation on host memory") == 2, job.output
