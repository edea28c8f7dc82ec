"""Ranks whose buffers are in (pretended) device memory; see pretended_cuda.c."""

from __future__ import annotations

import numpy as np

from nccl_emulator.programs.collectives import make_input, reduced
from nccl_emulator.ranks import Ranks

FLOAT32, SUM = 7, 0
DEVICE_BIT = 1 << 62
STREAM = 0x77


def _on_device(array: np.ndarray) -> int:
    return array.ctypes.data | DEVICE_BIT


def every_operation(ranks: Ranks, count: int) -> str:
    """Call everything once on device pointers; return the kind of memory."""
    comm, library = ranks.join(), ranks.library
    size, rank, end = comm.size, comm.rank, (comm.handle, STREAM)
    assert comm.value("CommCuDevice") == 0  # all on one device
    inputs = [make_input(r, count, np.dtype("f4")) for r in range(size)]
    total, own = reduced(inputs, "sum"), inputs[rank].copy()
    recv, all_of_them = np.zeros_like(own), np.zeros((size, count), np.float32)
    send_pointer, recv_pointer = _on_device(own), _on_device(recv)
    arguments = send_pointer, recv_pointer, count, FLOAT32

    library.call("AllReduce", *arguments, SUM, *end)
    assert (recv == total).all()
    recv[:] = 0
    library.call("Reduce", *arguments, SUM, size - 1, *end)
    assert (recv == (total if rank == size - 1 else 0)).all()
    library.call("Broadcast", *arguments, size - 1, *end)
    assert (recv == inputs[-1]).all()
    library.call(
        "AllGather", send_pointer, _on_device(all_of_them), *arguments[2:], *end
    )
    assert (all_of_them == inputs).all()
    all_pointer = _on_device(all_of_them)
    library.call("ReduceScatter", all_pointer, *arguments[1:], SUM, *end)
    assert (recv == reduced([inputs[rank]] * size, "sum")).all()
    with library.group():
        library.call("Send", send_pointer, count, FLOAT32, (rank + 1) % size, *end)
        library.call("Recv", recv_pointer, count, FLOAT32, (rank - 1) % size, *end)
    assert (recv == inputs[rank - 1]).all()
    library.call("AllReduce", send_pointer, send_pointer, count, FLOAT32, SUM, *end)
    assert (own == total).all()
    comm.destroy()
    return library.functions.ncclEmulatorMemory().decode()
