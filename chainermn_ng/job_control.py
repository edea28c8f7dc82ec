"""End the whole MPI job from one rank, at any moment of its life."""

from __future__ import annotations

import os
import socket
import stat
import sys
import time

from communicators import leaving

# Set by mpiexec for each rank: MPICH and relatives, Open MPI, Slurm's srun.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

# mpiexec kills the ranks as soon as it hears of an abort, and throws away what it has
# not read of their output by then: in 1 of 10 jobs the traceback was lost.
_OUTPUT_S = 0.5

# Children that a rank forks inherit everything that makes it a rank, and must never
# end the job: this module is imported early, in the rank itself.
_pid = os.getpid()

# What it is before chainermn_ng.exit_hooks replaces it.
_os_exit = os._exit


def is_rank_process() -> bool:
    """Tell whether this process is a rank itself, not a worker that a rank started."""
    if os.getpid() != _pid:
        return False
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is None or multiprocessing.parent_process() is None


def _mpi_running() -> bool:
    mpi4py_mpi = sys.modules.get("mpi4py.MPI")
    return (
        mpi4py_mpi is not None
        and mpi4py_mpi.Is_initialized()
        and not mpi4py_mpi.Is_finalized()
    )


def is_in_mpi() -> bool:
    """Tell whether MPI runs here, with other ranks beside this one."""
    return _mpi_running() and rank_and_size()[1] > 1


def leave_job() -> None:
    """Meet the other ranks at their ends, and end MPI, as at the end of a program.

    Each collective of theirs fails with an error that names this rank. Does nothing
    where no communicator has been made: MPI alone cannot tell the others.
    """
    if leaving.has_entered():
        leaving.leave()
        sys.modules["mpi4py.MPI"].Finalize()


def _first_int(names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return default


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, without starting MPI.

    Once MPI runs, it is asked; before, the launcher's environment variables are read.
    (0, 1) where there is no launcher.
    """
    if _mpi_running():
        world = sys.modules["mpi4py.MPI"].COMM_WORLD
        return world.rank, world.size
    return _first_int(_RANK_VARIABLES, 0), _first_int(_SIZE_VARIABLES, 1)


def flush_output() -> None:
    """Write out what print() still holds; a killed job would lose it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            # A closed stream or a reader that went away: the job must end anyhow.
            continue


def end_job(status: int, reason: str) -> None:
    """End all ranks with ``status``, after one line that names this rank.

    Does nothing (and returns) in workers, when MPI is finalized already, and in a job
    of one rank: there, the exit of the process is the exit of the job.

    Args:
        status: exit status of the job, 1 to 255.
        reason: what happened, for the message.
    """
    if not is_rank_process():
        return
    rank, size = rank_and_size()
    if size < 2:
        return
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_finalized():
        return
    running = _mpi_running()
    pmi_socket = None if running else _pmi_socket()
    if not running and "PMI_FD" in os.environ and pmi_socket is None:
        return  # a program that a rank started: it has its variables, not its socket
    flush_output()
    if sys.stderr is not None:
        sys.stderr.write(
            f"chainermn_ng: rank {rank} of {size} on {socket.gethostname()} ends the "
            f"job with status {status}: {reason}\n"
        )
    flush_output()
    time.sleep(_OUTPUT_S)
    if running:
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(status)
    # MPI has not started here. Starting it now could wait for ever for ranks that never
    # do. PRRTE (Open MPI) and srun end the job when a rank exits with a status other
    # than 0; Hydra (MPICH's mpiexec) leaves the others alone then, but takes an abort
    # on the rank's PMI-1 socket.
    if pmi_socket is not None:
        os.write(pmi_socket, f"cmd=abort exitcode={status}\n".encode())
        time.sleep(5)  # mpiexec kills this process meanwhile
    # Not sys.exit: this may be any thread, and other threads may never end.
    _os_exit(status)


def _pmi_socket() -> int | None:
    """Return the descriptor on which Hydra listens to this rank, if it is open."""
    descriptor = os.environ.get("PMI_FD", "")
    if not descriptor.isdecimal():
        return None
    try:
        mode = os.fstat(int(descriptor)).st_mode
    except OSError:
        return None
    return int(descriptor) if stat.S_ISSOCK(mode) else None
