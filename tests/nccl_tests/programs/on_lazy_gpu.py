"""Run functions of this file on CuPy's lazy stand-in, or on a GPU that all ranks share.

``mpiexec -n N python on_lazy_gpu.py KERNELS FUNCTION [ARGUMENT ...]``. KERNELS is the
library of the pack kernels for the host, and each rank has a device of its own; with
``cuda`` for KERNELS it is the real CuPy, on device 0. ``--`` separates several
functions.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from helpers import lazy_cupy
from helpers.gpu import load_cupy
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
# The lazy stand-in has only this one.
BINDING = os.environ.get("CHAINERMN_NG_NCCL_BINDING") or "pynccl"

# What a sum of a few numbers near 1 keeps, by what it is added and stored in.
PRECISION = {
    "bfloat16": 3e-2,
    "float16": 4e-3,
    "float32": 1e-6,
    "complex64": 1e-6,
    "float64": 1e-14,
}


def expect(condition: bool, *what: object) -> None:
    """Fail with what was seen."""
    if not condition:
        raise AssertionError(f"rank {RANK}: {what}")


def tell(text: str) -> None:
    """Print a line in one piece, which those of other ranks cannot mix with."""
    print(f"{text}\n", end="", flush=True)


def gradients(cp, *, step: int = 0, layouts: bool = True):
    """Return host arrays and device arrays of several dtypes and layouts."""
    random = np.random.RandomState(100 * step + RANK)
    dtypes = ["f4", "f2", "f8", "f4", "f4", "c8", "f2"]
    shapes = [(3, 5), (7,), (), (0, 4), (40, 30), (6,), (2, 9)]
    host = [
        np.asarray(random.randn(*shape)).astype(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    device = [cp.asarray(array) for array in host]
    if layouts:
        # Not contiguous: a transposed one, and every second row of another.
        wide = cp.asarray(np.repeat(host[4], 2, axis=0))
        device[4] = wide[::2]
        device[0] = cp.asarray(host[0].T.copy()).T
    return host, device


def means(host):
    """Return the means over the ranks, in float64."""
    everyone = WORLD.allgather(host)
    wide = [
        [a.astype("c16" if a.dtype.kind == "c" else "f8") for a in e] for e in everyone
    ]
    return [sum(column) / SIZE for column in zip(*wide, strict=True)]


def allreduce_arrays(cp, name, *options):
    """Average gradients over five steps, reading results only at the end of each."""
    from communicators import create_communicator

    settings = dict(option.split("=") for option in options)
    settings = {k: int(v) if v.isdigit() else v for k, v in settings.items()}
    with create_communicator(
        name, nccl_binding=BINDING, timeout_s=60, **settings
    ) as comm:
        for step in range(5):
            host, device = gradients(cp, step=step)
            expected = means(host)
            with lazy_cupy.counted() as happened:
                results = comm.allreduce_arrays(device)
            waits = [line for line in happened if line.startswith("host waits")]
            if name != "non_cuda_aware":
                expect(not waits, "the host waited for the device", happened)
            wire = settings.get("allreduce_grad_dtype")
            for given, result, array, mean in zip(
                device, results, host, expected, strict=True
            ):
                got = result.get()
                expect(result is given, "another array came back")
                expect(got.dtype == array.dtype, got.dtype, array.dtype)
                rtol = max(PRECISION.get(wire, 0), PRECISION[array.dtype.name])
                expect(np.allclose(got, mean, rtol=rtol, atol=rtol), step, got, mean)
            bits = WORLD.allgather([result.get().tobytes() for result in results])
            expect(all(other == bits[0] for other in bits), "bits differ")
        kernels = comm.nccl.device.kernels
        n_buckets = kernels.n_launches // 10
        expect(kernels.n_launches == 10 * n_buckets, kernels.n_launches)
        tell(f"launches {kernels.n_launches} bytes {kernels.n_bytes}")


def chunks(cp, n_streams):
    """Average in three chunks over a grid, whose links work at the same time."""
    from communicators import create_communicator

    with create_communicator(
        "multi_ring", topology="2x2", n_chunks=3, nccl_binding=BINDING, timeout_s=60
    ) as comm:
        # Not divisible by ranks and chunks; chunks have 256 KiB at least.
        host = np.random.RandomState(RANK).randn(250_001).astype("f4")
        array = cp.asarray(host)
        with lazy_cupy.counted() as happened:
            comm.allreduce_arrays([array])
        expect(np.allclose(array.get(), means([host])[0], atol=1e-5), "wrong mean")
        calls = [line.split() for line in happened if line.startswith("nccl")]
        streams = {call[-1] for call in calls}
        expect(len(streams) == int(n_streams), calls)
        # In the host and between hosts: reduce-scatter, then all-gather, back.
        names = [call[1] for call in calls]
        rs, ag = "reduce_scatter", "all_gather"
        # Wave by wave: (0), (0 1), (0 1 2), (0 1 2), (1 2), (2) by chunk.
        order = [rs, rs, rs, ag, rs, rs, ag, ag, rs, ag, ag, ag]
        expect(names == order, names)
        lanes = [call[-1] for call in calls]
        if len(streams) == 2:
            inside = lanes[0]
            in_host = [i for i, lane in enumerate(lanes) if lane == inside]
            expect(in_host == [0, 2, 5, 6, 9, 11], lanes)
        sent = comm.sent_bytes
        padded = -(-250_001 // 16) * 16 * 4
        expect(sent["dim0"] == sent["dim1"] * 2 == padded, sent, padded)


def arrays_in_streams(cp):
    """Use gradients that another stream makes; read the result in a third."""
    from communicators import create_communicator

    with create_communicator("multi_ring", nccl_binding=BINDING, timeout_s=60) as comm:
        for _ in range(3):
            with cp.cuda.Stream(non_blocking=True) as stream:
                host, device = gradients(cp)
                expected = means(host)
                comm.allreduce_arrays(device)
                event = cp.cuda.Event()
                event.record(stream)
            with cp.cuda.Stream(non_blocking=True) as other:
                other.wait_event(event)
                got = [array.copy().get() for array in device]
            for a, b in zip(got, expected, strict=True):
                expect(np.allclose(a, b, rtol=2e-3, atol=2e-3), a, b)


def missing_arrays(cp):
    """Average where only rank 0 has a gradient, and where rank 1 has none at all."""
    from communicators import ArraySpec, create_communicator

    with create_communicator("flat", nccl_binding=BINDING, timeout_s=60) as comm:
        here = cp.asarray(np.full(5, 6.0, "f4")) if RANK == 0 else None
        spec = ArraySpec((5,), np.dtype("f4"), "gpu")
        nowhere = ArraySpec((3,), np.dtype("f4"), "gpu")
        results = comm.allreduce_arrays([here if RANK == 0 else spec, nowhere])
        expect(isinstance(results[0], cp.ndarray), type(results[0]))
        expect((results[0].get() == 6.0 / SIZE).all(), results[0].get())
        expect(results[1] is None, results[1])


def array_collectives(cp):
    """Move and reduce device arrays by every array collective."""
    from communicators import create_communicator

    with create_communicator("flat", nccl_binding=BINDING, timeout_s=60) as comm:

        def mine(rank=RANK, n=4):
            return (np.arange(n, dtype="f4") + 10 * rank).reshape(2, -1)

        def check(got, expected):
            expect(isinstance(got, cp.ndarray), type(got))
            expect(np.array_equal(got.get(), expected), got.get(), expected)

        root = SIZE - 1
        got = comm.bcast(cp.asarray(mine()) if root == RANK else None, root=root)
        check(got, mine(root))
        for result in (
            comm.allgather(cp.asarray(mine())),
            comm.gather(cp.asarray(mine())),
        ):
            if result is not None:
                for rank in range(SIZE):
                    check(result[rank], mine(rank))
        uneven = comm.allgather(cp.asarray(mine(n=2 * (RANK + 1))))
        for rank in range(SIZE):
            check(uneven[rank], mine(rank, 2 * (rank + 1)))
        rows = [cp.asarray(mine(10 * RANK + dest)) for dest in range(SIZE)]
        for source, got in enumerate(comm.alltoall(rows)):
            check(got, mine(10 * source + RANK))
        check(comm.scatter(rows if RANK == 0 else None, root=0), mine(RANK))
        total = sum(mine(rank) for rank in range(SIZE))
        check(comm.allreduce(cp.asarray(mine())), total)
        check(comm.allreduce(cp.asarray(mine()), "mean"), total / SIZE)
        check(comm.allreduce(cp.asarray(mine()), "max"), mine(SIZE - 1))
        check(
            comm.allreduce(cp.asarray(mine().astype("i2")), "sum"), total.astype("i2")
        )
        nan = np.array([np.nan if RANK == SIZE - 1 else 1.0, -2.0 - RANK])
        got = comm.allreduce(cp.asarray(nan), "min").get()
        expect(np.isnan(got[0]) and got[1] == -1.0 - SIZE, got)
        blocks = np.stack([mine(RANK + block) for block in range(SIZE)])
        expected = sum(mine(rank + RANK) for rank in range(SIZE))
        check(comm.reduce_scatter(cp.asarray(blocks)), expected)
        if SIZE > 1 and RANK < 2:
            if RANK == 0:
                comm.send((cp.asarray(mine()), cp.asarray(mine(7))), 1)
            else:
                first, second = comm.recv(0)
                check(first, mine(0))
                check(second, mine(7))
        arrays = [cp.asarray(mine(RANK + i).astype(t)) for i, t in enumerate("fdifB")]
        comm.bcast_arrays(arrays, root=root)
        for i, (array, t) in enumerate(zip(arrays, "fdifB", strict=True)):
            check(array, mine(root + i).astype(t))


def refusals(cp):
    """Give the engine what it must refuse, on all ranks, and go on after it."""
    from communicators import MismatchError, create_communicator

    with create_communicator("flat", nccl_binding=BINDING, timeout_s=60) as comm:
        gpu, cpu = cp.asarray(np.ones(3, "f4")), np.ones(3, "f4")

        def raises(error_type, text, call):
            try:
                call()
            except error_type as error:
                expect(text in str(error), text, str(error))
            else:
                expect(False, f"no {error_type.__name__}")
            expect(comm.allreduce_obj(1) == SIZE)

        raises(TypeError, "mixed", lambda: comm.allreduce_arrays([gpu, cpu]))
        raises(TypeError, "mixed", lambda: comm.allgather((gpu, cpu)))
        if SIZE > 1:
            mine = gpu if RANK == 0 else cpu
            raises(MismatchError, "on a GPU", lambda: comm.allreduce_arrays([mine]))
            raises(MismatchError, "on a GPU", lambda: comm.allreduce(mine))
            raises(MismatchError, "GPU", lambda: comm.allgather(mine))

            class Odd:
                """Only rank 1 has it."""

                __cuda_array_interface__ = None

            bad = Odd() if RANK == 1 else gpu
            raises(Exception, "", lambda: comm.allreduce_arrays([bad]))
        got = comm.allreduce(gpu).get()
        expect((got == SIZE).all(), got)


def same_device(cp):
    """Two ranks of one host on one device."""
    from communicators import create_communicator

    comm = create_communicator("flat", nccl_binding=BINDING, timeout_s=60)
    comm.allreduce(cp.asarray(np.ones(3, "f4")))


def other_device(cp):
    """A device that is not the one of the first call."""
    from communicators import create_communicator

    with create_communicator("flat", nccl_binding=BINDING, timeout_s=60) as comm:
        comm.allreduce(cp.asarray(np.ones(3, "f4")))
        lazy_cupy.current_device += 100
        try:
            comm.allreduce(cp.asarray(np.ones(3, "f4")))
        except ValueError as error:
            expect("was first used with" in str(error), str(error))
        else:
            expect(False, "no error")


def never_done(cp):
    """A device that never gets on, and a program that does not ask it."""
    import time

    from communicators import create_communicator

    comm = create_communicator("flat", nccl_binding=BINDING, timeout_s=2)
    lazy_cupy.Event.done = property(lambda event: False)
    comm.allreduce(cp.asarray(np.ones(3, "f4")))
    tell("the call has returned")
    time.sleep(50)


def split(cp):
    """A communicator made by split works on devices too."""
    from communicators import create_communicator

    with create_communicator("flat", nccl_binding=BINDING, timeout_s=60) as comm:
        part = comm.split(RANK % 2)
        got = part.allreduce(cp.asarray(np.full(3, RANK + 1.0, "f4"))).get()
        expected = sum(rank + 1.0 for rank in range(RANK % 2, SIZE, 2))
        expect((got == expected).all(), got, expected)
        part.finalize()


def bench(cp):
    """Communicators are compared on device arrays, and timed until these are done."""
    from communicators import create_communicator
    from communicators.bench import Bench, BenchDevice, Load, Settings
    from communicators.bench_candidates import choose_candidates
    from communicators.measuring import Timing

    def n_waits():
        return float(lazy_cupy.log.count("host waits for a stream"))

    timing = Timing(1, 2, clock=n_waits).on_device(
        lambda: cp.cuda.get_current_stream().synchronize()
    )
    candidates = choose_candidates(
        ["flat", "pure_nccl", "multi_ring"], [f"nccl_binding={BINDING}"]
    )
    settings = Settings(candidates, [Load(4096)], timing=timing)
    with create_communicator("naive", timeout_s=60) as comm:
        rows = Bench(comm, settings, BenchDevice("gpu", cp)).run().rows
    mpi, *others = rows
    expect(mpi.skipped == "host memory only", mpi)
    expect(len(others) == 3, others)
    for row in others:
        expect(row.skipped is None and min(row.times_s) >= 1.0, row)


def left_open(cp):
    """A communicator that nobody finalizes is still there when the program ends."""
    from communicators import create_communicator

    comm = create_communicator("pure_nccl", nccl_binding=BINDING, timeout_s=60)
    got = comm.allreduce(cp.asarray(np.full(3, RANK + 1.0, "f4"))).get()
    expect((got == SIZE * (SIZE + 1) / 2).all(), got)


def main() -> None:
    """Become a rank with a GPU, and run the functions."""
    kernels, *words = sys.argv[1:]
    groups = itertools.groupby(words, "--".__eq__)
    calls = [list(group) for is_border, group in groups if not is_border]
    same = kernels == "cuda" or calls[0][0] == "same_device"
    cp = load_cupy(kernels, 0 if same else RANK)
    for function, *arguments in calls:
        globals()[function](cp, *arguments)
    tell("done")


if __name__ == "__main__":
    main()
