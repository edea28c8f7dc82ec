"""Report what communicators count as sent, and what the network card counts."""

import sys
from collections import Counter

import numpy as np
from mpi4py import MPI
from report import print_by_rank, resent_by_host, sent_by_host

from communicators import create_communicator

NBYTES = 8 << 20
world = MPI.COMM_WORLD


def _measure(name: str) -> dict[str, object]:
    with create_communicator(name) as comm:
        array = np.ones(NBYTES // 4, "float32")
        comm.allreduce_arrays([array])  # connections are made at first use
        counted = Counter(comm.sent_bytes)
        world.Barrier()
        on_wire, resent = sent_by_host(), resent_by_host()
        # Nobody may send before all have read their counter.
        world.Barrier()
        comm.allreduce_arrays([array])
        world.Barrier()
        on_wire, resent = sent_by_host() - on_wire, resent_by_host() - resent
        counted = {k: n - counted[k] for k, n in comm.sent_bytes.items()}
        assert (array == 1).all()
        return {
            "host": comm.inter_rank,
            "counted": counted,
            "on_wire": on_wire,
            "resent_segments": resent,
        }


print_by_rank(world, {name: _measure(name) for name in sys.argv[1:]})
