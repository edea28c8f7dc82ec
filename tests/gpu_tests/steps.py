"""What is run on a GPU, in this order: checks first, timings after."""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from helpers.jobs import REPOSITORY, mpiexec

from gpu_tests.tables import Table

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
ON_GPU = PROGRAMS.parents[1] / "nccl_tests" / "programs" / "on_lazy_gpu.py"

#: Communicators that average over any hosts. ``dummy`` and ``single_node`` do not.
NAMES = (
    *("auto", "flat", "hierarchical", "multi_ring"),
    *("naive", "non_cuda_aware", "pure_nccl", "two_dimensional"),
)
WIRES = ("float16", "bfloat16", "float32", "float64")


class NotHere(Exception):
    """This machine lacks what a step needs; the text says what."""


@dataclass(frozen=True)
class Command:
    """A process to run.

    Attributes:
        argv: program and arguments.
        env: variables added to the environment.
        must_fail: it has to end with another status than 0.
        texts: what its output must hold.
    """

    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    must_fail: bool = False
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Step:
    """A check or a timing.

    Attributes:
        name: for the command line.
        what: for the table.
        limit_s: seconds after which it counts as hanging.
        command: makes the command; raises :class:`NotHere`.
    """

    name: str
    what: str
    limit_s: float
    command: Callable[[], Command]


def result_tables() -> dict[str, Table]:
    """Return the tables that programs fill, by the name they use."""
    return {
        "environment": Table("Environment", ["", "found"]),
        "training": Table(
            "Training of the digits example",
            ["ranks", "NCCL", "wire", "double buffering", "accuracy", "seconds"],
            note="Expected: an accuracy of 0.95 or more. Seconds include the start.",
        ),
        "bandwidth": Table(
            "Packing the gradients of ResNet-50 (161 arrays, 25,557,032 float32)",
            ["what", "launches", "ms", "GB/s", "of the copy"],
            note="Bytes read and written over the median time, by CUDA events; the "
            "copy moves as many bytes as the gradients from device to device.",
        ),
        "profile": Table(
            "One training step",
            ["phase", "host ms", "device ms"],
            note="Medians. Host: until the call returns. Device: between events "
            "before and after it on the phase's stream, waits included. With one "
            "rank NCCL has nothing to send.",
        ),
    }


def steps() -> list[Step]:
    """Return all steps in their order."""
    return [
        Step("environment", "GPU, driver and packages", 60, _environment),
        Step("nccl-cupy", "NCCL by CuPy, one rank", 90, lambda: _one_rank("cupy")),
        Step(
            "nccl-pynccl", "NCCL by pynccl, one rank", 90, lambda: _one_rank("pynccl")
        ),
        Step("one-device", "NCCL: two ranks on a device", 45, _same_device),
        Step("check", "python -m chainermn_ng.check", 60, _check),
        Step("kernels", "pack and unpack kernels", 90, lambda: _kernels("check")),
        Step("ranks-2", "2 ranks on the device", 90, _two_ranks),
        Step("ranks-4", "4 ranks on the device", 120, _four_ranks),
        Step("training-1", "training, NCCL, float32", 60, lambda: _train(1, "float32")),
        Step(
            "training-1-half",
            "training, NCCL, float16",
            45,
            lambda: _train(1, "float16"),
        ),
        Step(
            "training-2", "training, 2 ranks, float32", 60, lambda: _train(2, "float32")
        ),
        Step(
            "training-2-half",
            "training, 2 ranks, float16",
            45,
            lambda: _train(2, "float16"),
        ),
        Step(
            "training-2-double",
            "training, double buffering",
            45,
            lambda: _train(2, "float32", "--double-buffering"),
        ),
        Step("bandwidth", "bandwidth of the kernels", 60, lambda: _kernels("measure")),
        Step("profile", "profile of a training step", 60, _profile),
    ]


# -- commands ---


def calls_of_one_rank() -> list[str]:
    """Return the arguments for :data:`ON_GPU` on one rank."""
    averages = [["allreduce_arrays", n] for n in (*NAMES, "dummy", "single_node")]
    wires = [["allreduce_arrays", "flat", f"allreduce_grad_dtype={w}"] for w in WIRES]
    return _joined([*averages, *wires, *_COLLECTIVES, ["left_open"]])


def calls_of_two_ranks() -> list[str]:
    """Return the arguments for :data:`ON_GPU` on two ranks, as if on two hosts."""
    averages = [["allreduce_arrays", n, "topology=2x1"] for n in NAMES]
    wires = [
        ["allreduce_arrays", name, f"allreduce_grad_dtype={wire}"]
        for name in ("flat", "non_cuda_aware", "single_node")
        for wire in WIRES
    ]
    return _joined([*averages, *wires, *_COLLECTIVES, ["split"], ["left_open"]])


def calls_of_four_ranks() -> list[str]:
    """Return the arguments for :data:`ON_GPU` on four ranks, as if on two hosts."""
    averages = [["allreduce_arrays", n, "topology=2x2"] for n in NAMES]
    wires = [
        ["allreduce_arrays", n, "topology=2x2", f"allreduce_grad_dtype={wire}"]
        for n in ("hierarchical", "multi_ring", "two_dimensional")
        for wire in ("float16", "bfloat16")
    ]
    return _joined([*averages, *wires, *_COLLECTIVES, ["split"]])


_COLLECTIVES = [
    ["array_collectives"],
    ["arrays_in_streams"],
    ["missing_arrays"],
    ["refusals"],
]


def _joined(calls: Sequence[Sequence[str]]) -> list[str]:
    parts = itertools.chain.from_iterable(["--", *call] for call in calls)
    return list(parts)[1:]


def _environment() -> Command:
    return _python(PROGRAMS / "environment.py", "cuda")


def _one_rank(binding: str) -> Command:
    return _python(ON_GPU, "cuda", *calls_of_one_rank(), binding=binding)


def _check() -> Command:
    argv = [sys.executable, "-m", "chainermn_ng.check"]
    return Command(argv, texts=["average by pure_nccl on GPUs", "all is well"])


def _same_device() -> Command:
    argv = _on_ranks(2, [], [str(ON_GPU), "cuda", "same_device"])
    text = "ranks 0, 1 of one host all use cuda:0"
    return Command(argv, must_fail=True, texts=[text])


def _kernels(what: str) -> Command:
    return _python(PROGRAMS / "kernels.py", "cuda", what)


def _two_ranks() -> Command:
    return _on_emulator(2, [str(ON_GPU), "cuda", *calls_of_two_ranks()], "cupy")


def _four_ranks() -> Command:
    return _on_emulator(4, [str(ON_GPU), "cuda", *calls_of_four_ranks()], "pynccl")


def _train(n_ranks: int, wire: str, *options: str) -> Command:
    argv = [str(PROGRAMS / "train_digits.py"), "gpu", wire, *options]
    if n_ranks > 1:
        return _on_emulator(n_ranks, argv, "cupy")
    return _python(*argv, binding="cupy")


def _profile() -> Command:
    return _python(PROGRAMS / "profile_step.py", "gpu", binding="cupy")


def _python(*argv: object, binding: str | None = None) -> Command:
    env = {"CHAINERMN_NG_NCCL_BINDING": binding} if binding else {}
    return Command([sys.executable, *map(str, argv)], env)


def _on_emulator(n_ranks: int, argv: Sequence[str], binding: str) -> Command:
    """Run ranks that share the device: NCCL's place is taken by the emulator.

    It is preloaded, since CuPy prefers NVIDIA's pip package to LD_LIBRARY_PATH.
    """
    from nccl_emulator.build import LIBRARY, CannotBuildError, build

    try:
        library = build("cuda") / LIBRARY
    except CannotBuildError as error:
        raise NotHere(str(error).splitlines()[0]) from error
    preload = ":".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    variables = [f"LD_PRELOAD={preload}", f"CHAINERMN_NG_NCCL_BINDING={binding}"]
    return Command(_on_ranks(n_ranks, variables, argv))


def _on_ranks(n_ranks: int, variables: Sequence[str], argv: Sequence[str]) -> list[str]:
    # Variables by env: mpiexec itself must not load the library, and its option for
    # them has another name in each MPI.
    return [
        *(mpiexec(), "-n", str(n_ranks), "env", *variables),
        *(sys.executable, *argv),
    ]


def paths() -> list[str]:
    """Return the folders that programs import from."""
    return [str(REPOSITORY), str(REPOSITORY / "tests")]
