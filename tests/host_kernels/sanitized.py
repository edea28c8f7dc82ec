"""Random cases under sanitizers: ``python -m host_kernels.sanitized LIBRARY N``.

Runs in a process of its own, which has to be started with AddressSanitizer in it.
A further argument ``--faulty`` does what must end the process: it tells a kernel of a
buffer longer than there is.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np

from communicators.devices.flat_buffer_kernels import FlatBufferKernels
from host_kernels.cases import Case, random_case
from host_kernels.library import HostLauncher
from host_kernels.memory import PoisonedMemory


class _LongBuffers(FlatBufferKernels):
    def pack(
        self,
        table: int,
        n_rows: int,
        buffer: int,
        n_elems: int,
        *args: Any,
        **more: Any,
    ) -> None:
        super().pack(table, n_rows, buffer, n_elems + 1, *args, **more)


def main() -> None:
    """Run the cases; say how many there were."""
    library, n_cases, *flags = sys.argv[1:]
    launcher = HostLauncher(pathlib.Path(library))
    if flags:
        case = Case(np.dtype("f4"), [np.ones(10, "f4")])
        case.check(_LongBuffers(launcher, 1), PoisonedMemory())
    kernels = FlatBufferKernels(launcher, 1)
    for seed in range(int(n_cases)):
        random_case(np.random.RandomState(seed)).check(kernels, PoisonedMemory())
    print(f"{n_cases} cases, {kernels.n_launches} launches")


if __name__ == "__main__":
    main()
