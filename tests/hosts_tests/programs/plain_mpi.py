"""Report, with mpi4py alone, where each rank is and what an all-reduce sends."""

import time

import numpy as np
from mpi4py import MPI
from report import print_by_rank, sent_by_host

NBYTES = 4 << 20

world = MPI.COMM_WORLD
host = world.Split_type(MPI.COMM_TYPE_SHARED)
data = np.full(NBYTES // 8, world.rank + 1.0)
total = np.empty_like(data)

world.Barrier()
sent, start = sent_by_host(), time.monotonic()
# Nobody may send before all have read their counter.
world.Barrier()
world.Allreduce(data, total)
world.Barrier()
seconds, sent = time.monotonic() - start, sent_by_host() - sent

assert (total == world.size * (world.size + 1) / 2).all()
print_by_rank(
    world,
    {
        "host": MPI.Get_processor_name(),
        "intra_rank": host.rank,
        "intra_size": host.size,
        "nbytes": NBYTES,
        "sent": sent,
        "seconds": seconds,
    },
)
