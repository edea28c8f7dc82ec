"""How worker processes start beside a running MPI."""

from __future__ import annotations

import multiprocessing
import warnings

from chainermn_ng.job_control import rank_and_size

_is_warned = False


def warn_of_fork(stacklevel: int) -> None:
    """Warn once, on rank 0 of several, if workers are about to be forked.

    A forked worker has a copy of everything that MPI, CUDA and their threads hold at
    that moment. On some networks it crashes or hangs then, or its rank does.

    Args:
        stacklevel: whom the warning names, as for :func:`warnings.warn`.
    """
    global _is_warned
    rank, size = rank_and_size()
    if _is_warned or size < 2 or rank != 0:
        return
    # Asking without allow_none would settle the method for the rest of the program.
    method = multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) != "fork":
        return
    _is_warned = True
    warnings.warn(
        "worker processes are forked while MPI runs, which can crash or hang on some "
        "networks and with GPUs. Begin the program with "
        "multiprocessing.set_start_method('forkserver'), below "
        "if __name__ == '__main__':",
        stacklevel=stacklevel,
    )
