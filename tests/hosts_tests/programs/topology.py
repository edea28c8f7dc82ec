"""Report how a communicator sees the hosts, and its parts after a split."""

from mpi4py import MPI
from report import print_by_rank

from communicators import create_communicator


def _place(comm) -> dict[str, int]:
    names = "rank size intra_rank intra_size inter_rank inter_size world_intra_rank"
    return {name: getattr(comm, name) for name in names.split()}


with create_communicator("naive") as comm:
    whole = _place(comm)
    # Ranks with equal positions on their hosts: no two of a part share a host.
    with comm.split(comm.intra_rank, comm.rank) as part:
        across = _place(part)
    with comm.split(comm.inter_rank, -comm.rank) as part:
        inside = _place(part)

print_by_rank(MPI.COMM_WORLD, {"whole": whole, "across": across, "inside": inside})
