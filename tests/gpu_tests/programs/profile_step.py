"""Where the time of a training step goes: ``profile_step.py gpu|cpu [STEPS [UNITS]]``.

One rank, so NCCL has nothing to send: what is seen is what everything around it costs.
With ``cpu`` NumPy arrays travel by the emulated NCCL (for tests of this program).
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import chainermn_ng  # first: it makes Chainer importable

# isort: split
import chainer
import numpy as np
from chainer import functions as F
from chainer import links as L

from communicators.agreement import Agreement
from communicators.nccl_bindings import NcclCommunicator
from gpu_tests.results import tell_detail, tell_row

N_WARM_UP = 5
N_STEPS = 30
N_UNITS = 4096
N_INPUTS, N_CLASSES, BATCH = 784, 10, 256

PHASES = ("forward", "backward", "agree", "pack", "NCCL", "unpack", "update")
STEP = "whole step"


class MLP(chainer.Chain):
    """Three layers, as in the example, but with the parameters of a larger model."""

    def __init__(self, n_units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(N_INPUTS, n_units)
            self.l2 = L.Linear(n_units, n_units)
            self.l3 = L.Linear(n_units, N_CLASSES)

    def forward(self, x: Any) -> Any:
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


class Phases:
    """Times calls, by the host's clock and by events of the device.

    Args:
        cp: CuPy; ``None`` for the host's clock alone.
    """

    def __init__(self, cp: Any) -> None:
        self._cp = cp
        self._steps: list[dict[str, list[tuple[float, Any, Any]]]] = []

    def begin_step(self) -> None:
        """Count what follows as a new step."""
        self._steps.append(defaultdict(list))

    def forget(self) -> None:
        """Forget all steps so far."""
        self._steps.clear()

    def timed(
        self,
        phase: str,
        function: Callable[..., Any],
        stream_of: Callable[..., int | None] = lambda *_args: None,
    ) -> Callable[..., Any]:
        """Return ``function`` with its calls timed.

        Args:
            phase: what they count as.
            function: to be called.
            stream_of: given the arguments, the pointer of the stream on which it works;
                ``None`` for the current one.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwds: Any) -> Any:
            stream = stream_of(*args)
            before, start_s = self._event(stream), time.perf_counter()
            try:
                return function(*args, **kwds)
            finally:
                host_s = time.perf_counter() - start_s
                times = (host_s, before, self._event(stream))
                self._steps[-1][phase].append(times)

        return call

    def host_ms(self, phase: str) -> float:
        """Return the median over the steps of what the host spent in a phase."""
        return statistics.median(
            sum(host_s for host_s, _, _ in step[phase]) * 1e3 for step in self._steps
        )

    def device_ms(self, phase: str) -> float | None:
        """Return the same for the device; the device has been waited for."""
        if self._cp is None:
            return None
        elapsed = self._cp.cuda.get_elapsed_time
        return statistics.median(
            sum(elapsed(before, after) for _, before, after in step[phase])
            for step in self._steps
        )

    def _event(self, stream: int | None) -> Any:
        if self._cp is None:
            return None
        event = self._cp.cuda.Event()
        if stream is None:
            event.record()
        else:
            self._cp.cuda.runtime.eventRecord(event.ptr, stream)
        return event


def prepare(
    is_gpu: bool, n_units: int, phases: Phases
) -> tuple[Callable[[], None], int]:
    """Set a model up and let its phases be timed.

    Returns:
        What makes a step, and the bytes of all gradients.
    """
    # With a dtype for the wire, one rank does what several do.
    comm = chainermn_ng.create_communicator(
        "pure_nccl", timeout_s=60, allreduce_grad_dtype="float32"
    )
    device = chainer.get_device("@cupy:0" if is_gpu else "@numpy")
    device.use()
    model = L.Classifier(MLP(n_units))
    model.to_device(device)
    actual = chainer.optimizers.Adam()
    optimizer = chainermn_ng.create_multi_node_optimizer(actual, comm)
    optimizer.setup(model)
    random = np.random.RandomState(0)
    x = device.send(random.rand(BATCH, N_INPUTS).astype(np.float32))
    t = device.send(random.randint(0, N_CLASSES, BATCH).astype(np.int32))

    def loss(*batch: Any) -> Any:
        value = phases.timed("forward", model)(*batch)
        value.backward = phases.timed("backward", value.backward)
        return value

    def step() -> None:
        optimizer.update(loss, x, t)

    # The first one sets NCCL up and compiles the kernels.
    phases.begin_step()
    step()
    engine_device = comm.engine.nccl.device
    for phase in ("pack", "unpack"):
        timed = phases.timed(phase, getattr(engine_device, phase))
        setattr(engine_device, phase, timed)
    actual.update = phases.timed("update", actual.update)
    Agreement.check = phases.timed("agree", Agreement.check)
    NcclCommunicator.all_reduce = phases.timed(
        "NCCL", NcclCommunicator.all_reduce, lambda *args: args[-1]
    )
    return step, sum(p.array.nbytes for p in model.params())


def main() -> None:
    """Time steps, and tell a row a phase."""
    where, *given = sys.argv[1:]
    is_gpu = where == "gpu"
    defaults = [N_STEPS, N_UNITS]
    n_steps, n_units = [*map(int, given), *defaults[len(given) :]]
    cupy = chainer.backends.cuda.cupy if is_gpu else None
    phases = Phases(cupy)
    make_step, n_bytes = prepare(is_gpu, n_units, phases)

    def whole() -> None:
        make_step()
        if cupy is not None:
            cupy.cuda.Device().synchronize()

    step = phases.timed(STEP, whole)
    for _ in range(N_WARM_UP):
        phases.begin_step()
        step()
    phases.forget()
    for _ in range(n_steps):
        phases.begin_step()
        step()
    for phase in (*PHASES, STEP):
        host_ms, device_ms = phases.host_ms(phase), phases.device_ms(phase)
        on_host_only = device_ms is None or phase == "agree"
        shown = "-" if on_host_only else f"{device_ms:.3f}"
        tell_row("profile", phase, f"{host_ms:.3f}", shown)
    tell_detail(
        f"{n_bytes / 1e6:.0f} MB of gradients, batch {BATCH}, "
        f"{phases.host_ms(STEP):.2f} ms a step"
    )


if __name__ == "__main__":
    main()
