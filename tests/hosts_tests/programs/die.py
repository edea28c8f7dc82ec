"""The last rank, alone on another host or not, dies while the others wait for it."""

import os
import signal

from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
if world.rank == world.size - 1:
    os.kill(os.getpid(), signal.SIGKILL)
world.Barrier()
