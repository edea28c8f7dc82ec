"""Share data within hosts, from one rank and from one rank a host; report the bytes."""

import pathlib

import numpy as np
from report import print_by_rank

import chainermn_ng
from chainermn_ng.datasets import scatter_dataset, share_in_host

comm = chainermn_ng.create_communicator("flat", timeout_s=30)
X = np.arange(250_000, dtype="f").reshape(100, -1)


def mapped() -> list[str]:
    """Return the inodes of the shared memory that this process maps."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:chainermn_ng" in line]


last = comm.size - 1
whole = share_in_host(comm, X if comm.rank == last else None, root=last)
files = mapped()
is_right = bool((whole == X).all())
writable = whole.flags.writeable
del whole
own = share_in_host(comm, X + comm.inter_rank if comm.intra_rank == 0 else None)
is_right = is_right and bool((own == X + comm.inter_rank).all())
del own
shard = scatter_dataset(X if comm.rank == 0 else None, comm, shared_memory=True)
is_right = is_right and all(
    (x == X[i]).all() for x, i in zip(shard, shard.indices, strict=True)
)
print_by_rank(comm.mpi_comm, [is_right, writable, files, mapped()])
comm.finalize()
