"""Run the digits example: ``train_digits.py gpu|cpu WIRE [OPTION ...]``.

WIRE is the dtype in which gradients travel; options are those of the example. All ranks
use device 0. With ``cpu`` NumPy arrays travel by the emulated NCCL (for tests of this
program).
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import runpy
import sys
import tempfile
import time
from typing import Any

import chainermn_ng
import communicators
from gpu_tests.results import tell_detail, tell_row

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples/mnist/train_mnist.py"
ACCURACY = 0.95


def with_settings(wire: str, made: list[Any]) -> None:
    """Let the example make its communicator with a wire dtype, on device 0."""
    create = chainermn_ng.create_communicator

    def create_communicator(*args: Any, **options: Any) -> Any:
        settings = {"allreduce_grad_dtype": wire, "timeout_s": 60, **options}
        made.append(create(*args, **settings))
        return made[-1]

    chainermn_ng.create_communicator = create_communicator
    communicators.CommunicatorBase.world_intra_rank = 0


def run_example(options: list[str]) -> tuple[str, float]:
    """Run the example's main program.

    Returns:
        What it has printed, and the seconds that it took.

    Raises:
        SystemExit: its accuracy is too low, or ranks ended with different parameters.
    """
    output = io.StringIO()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [str(EXAMPLE), "--communicator", "pure_nccl", "--out", folder]
        sys.argv += ["--expect-accuracy", str(ACCURACY), *options]
        try:
            with contextlib.redirect_stdout(output):
                runpy.run_path(str(EXAMPLE), run_name="__main__")
        finally:
            print(output.getvalue())
    return output.getvalue(), time.monotonic() - start


def main() -> None:
    """Train, and tell the accuracy; it has been checked by the example itself."""
    device, wire, *options = sys.argv[1:]
    made: list[Any] = []
    with_settings(wire, made)
    output, seconds = run_example(options + (["--gpu"] if device == "gpu" else []))
    (comm,) = made
    nccl = comm.engine.nccl
    assert nccl.world is not None, "the gradients have not travelled by NCCL"
    if device == "gpu":
        kernels = nccl.device.kernels
        assert kernels.n_launches > 0, "no kernel has packed the gradients"
    if comm.rank == 0:
        found = re.search(r"validation accuracy: ([\d.]+)", output)
        assert found is not None, "the example has not said how accurate it is"
        binding = nccl.world.nccl.binding
        library = "NVIDIA's" if binding.memory == "cuda" else "emulated"
        is_double = "yes" if "--double-buffering" in options else "no"
        cells = (comm.size, library, wire, is_double, found[1], f"{seconds:.1f}")
        tell_row("training", *cells)
        tell_detail(f"accuracy {found[1]}")


if __name__ == "__main__":
    main()
