"""What the programs here share: the host's counters, one report for all ranks."""

import json
import pathlib


def sent_by_host() -> int:
    """Return the bytes that this host's eth0 has sent so far, headers included."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise RuntimeError("no eth0 here")


def resent_by_host() -> int:
    """Return the TCP segments that this host has sent a second time so far."""
    lines = pathlib.Path("/proc/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def print_by_rank(mpi_comm, what) -> None:
    """Print, on rank 0 alone, one JSON line: a list of every rank's ``what``."""
    everything = mpi_comm.gather(what)
    if mpi_comm.rank == 0:
        print("REPORT", json.dumps(everything), flush=True)
