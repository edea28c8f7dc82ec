"""Scripts that ask for a GPU, on machines that have none.

Such a script ends with an error that says so, unless it was asked to run on the CPU
instead: by ``python -m chainermn_ng --cpu-fallback script.py``, or by the environment
variable ``CHAINERMN_NG_CPU_FALLBACK=1``. Then what asks Chainer for a GPU (``to_gpu``,
``get_device_from_id``, ``get_device("@cupy:0")``, the device numbers of updaters and
evaluators) gets the CPU, and communicators that work on GPUs only are replaced by
``"auto"``. Where there is a GPU nothing is changed. Code that calls CuPy itself cannot
be helped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import chainer
from chainer import device_resident, variable
from chainer.backends import cuda

from chainermn_ng import job_control
from communicators import UnavailableError

VARIABLE = "CHAINERMN_NG_CPU_FALLBACK"
OPTION = "--cpu-fallback"

#: What is taken for communicators that average arrays on GPUs only.
_SUBSTITUTES = {"pure_nccl": "auto", "non_cuda_aware": "auto"}
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")

_HINT = (
    "To run what asks for a GPU on the CPU: python -m chainermn_ng "
    f"{OPTION} script.py, or {VARIABLE}=1 in the environment"
)

_active = False


def is_active() -> bool:
    """Tell whether requests for a GPU get the CPU."""
    return _active


def explain(error: UnavailableError, communicator_name: str) -> None:
    """Let an error about a communicator for GPUs say how to do without.

    Args:
        error: raised by the creation of a communicator; gets another text.
        communicator_name: which.
    """
    if communicator_name in _SUBSTITUTES:
        error.args = (f"{error}. {_HINT}",)


def substitute(communicator_name: str) -> str:
    """Return the name of the communicator to take for one of the given name."""
    if _active:
        return _SUBSTITUTES.get(communicator_name, communicator_name)
    return communicator_name


def is_asked_for() -> bool:
    """Tell what the environment says.

    Raises:
        ValueError: the variable is neither on nor off.
    """
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word not in (*_ON, *_OFF):
        raise ValueError(f"{VARIABLE}={word!r}: expected 1 (on) or 0 (off)")
    return word in _ON


def prepare(why_no_gpu: Callable[[int], str | None]) -> None:
    """Fall back to the CPU if that is asked for and there is no GPU.

    Otherwise let Chainer's error say how to ask.

    Args:
        why_no_gpu: tells why this process cannot use the GPU of a number.
    """
    global _active
    if _active:
        return
    if not is_asked_for():
        _explain()
        return
    reason = why_no_gpu(0)
    if reason is None:
        return
    _active = True
    _answer_with_the_cpu()
    if job_control.is_rank_process() and job_control.rank_and_size()[0] == 0:
        sys.stderr.write(
            f"chainermn_ng: {reason}. What asks for a GPU runs on the CPU "
            f"({OPTION} or {VARIABLE}=1)\n"
        )


_chainers_check = cuda.check_cuda_available


def _explain() -> None:
    def check_cuda_available() -> None:
        try:
            _chainers_check()
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}. This rank has no GPU that Chainer can use. {_HINT}"
            ) from None

    # Chainer's modules call it by this name.
    cuda.check_cuda_available = check_cuda_available


def _answer_with_the_cpu() -> None:
    cpu = chainer.get_device("@numpy")

    def to_cpu(self: Any, device: Any = None) -> Any:
        return self.to_device(cpu)

    cuda.check_cuda_available = lambda: None
    cuda.get_device_from_id = lambda device_id: cuda.DummyDevice
    cuda.get_device = lambda *args: cuda.DummyDevice
    cuda.to_gpu = lambda array, device=None, stream=None: cuda.to_cpu(array)
    cuda.GpuDevice.from_device_id = staticmethod(lambda device_id: cpu)
    device_resident.DeviceResident.to_gpu = to_cpu
    variable.Variable.to_gpu = to_cpu
    variable.Parameter.to_gpu = to_cpu
