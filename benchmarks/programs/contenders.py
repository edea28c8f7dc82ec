"""Ways to reduce a set of arrays over all ranks: ours by name, and the peers.

``ours:NAME`` or ``ours:NAME:OPTION=VALUE,...`` is a communicator of this project;
``chainermn:naive`` that of ChainerMN 7.8.1, which is inside Chainer; ``mpi4py:flat``
one ``Allreduce`` in place on a flat buffer; ``torch:gloo`` torch's ``all_reduce`` on a
flat tensor. The last two have nothing to pack and sum without dividing, which is less
than what the others do.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


class Contender(ABC):
    """Float32 arrays and a way to reduce them in place. Making one is collective.

    Attributes:
        takes_mean: whether it divides by the number of ranks.
    """

    takes_mean = True

    @abstractmethod
    def arrays(self) -> Sequence[np.ndarray]:
        """Return the arrays where their values are now."""

    @abstractmethod
    def reduce(self) -> None:
        """Reduce once; on return the arrays hold the result. Collective."""

    def fill(self) -> None:
        """Set all values to this rank's number plus 1."""
        for array in self.arrays():
            array.fill(WORLD.rank + 1)

    def check(self, calls: int) -> None:
        """Raise unless a few values are right after ``calls`` calls since ``fill``."""
        expected = WORLD.size * (WORLD.size + 1) / 2
        expected *= 1 / WORLD.size if self.takes_mean else WORLD.size ** (calls - 1.0)
        for array in (self.arrays()[0], self.arrays()[-1]):
            for value in (array.flat[0], array.flat[-1]):
                if not np.isclose(value, expected, rtol=1e-5):
                    raise ValueError(f"{type(self).__name__}: {value}, not {expected}")


class Ours(Contender):
    """A communicator of this project, on arrays that lie apart."""

    def __init__(self, spec: str, shapes: Sequence[tuple[int, ...]]) -> None:
        from communicators import create_communicator

        name, _, options = spec.partition(":")
        self._comm = create_communicator(name, **parse_options(options))
        self._arrays = [np.empty(shape, np.float32) for shape in shapes]

    def arrays(self) -> Sequence[np.ndarray]:
        return self._arrays

    def reduce(self) -> None:
        self._comm.allreduce_arrays(self._arrays, op="mean")


class ChainerMN(Contender):
    """ChainerMN 7.8.1, on the gradients of a model with such parameters."""

    def __init__(self, name: str, shapes: Sequence[tuple[int, ...]]) -> None:
        from chainermn_ng.compat import prepare_chainer

        # It neither imports nor runs on NumPy 2 by itself.
        prepare_chainer()
        import chainer
        import chainermn

        self._comm = chainermn.create_communicator(name)
        self._model = chainer.Link()
        with self._model.init_scope():
            for i, shape in enumerate(shapes):
                parameter = chainer.Parameter(np.zeros(shape, np.float32))
                parameter.grad = np.empty(shape, np.float32)  # type: ignore[misc]
                setattr(self._model, f"p{i}", parameter)

    def arrays(self) -> Sequence[Any]:
        return [parameter.grad for parameter in self._model.params()]

    def reduce(self) -> None:
        self._comm.multi_node_mean_grad(self._model)


class FlatMPI(Contender):
    """One MPI call on one flat buffer."""

    takes_mean = False

    def __init__(self, _name: str, shapes: Sequence[tuple[int, ...]]) -> None:
        self._buffer = flat_buffer(shapes)

    def arrays(self) -> Sequence[np.ndarray]:
        return [self._buffer]

    def reduce(self) -> None:
        WORLD.Allreduce(MPI.IN_PLACE, self._buffer)


class FlatGloo(Contender):
    """torch's gloo, in these processes, on one flat tensor. One host only."""

    takes_mean = False

    def __init__(self, name: str, shapes: Sequence[tuple[int, ...]]) -> None:
        # Else it asks the resolver for this machine's name, which may know no answer.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        if not distributed.is_initialized():
            # The ranks find each other by a file in it.
            self._folder = tempfile.TemporaryDirectory(prefix="gloo-")
            distributed.init_process_group(
                name,
                init_method=f"file://{WORLD.bcast(self._folder.name)}/meeting",
                rank=WORLD.rank,
                world_size=WORLD.size,
            )
        self._all_reduce = distributed.all_reduce
        self._buffer = flat_buffer(shapes)
        self._tensor = torch.from_numpy(self._buffer)

    def arrays(self) -> Sequence[np.ndarray]:
        return [self._buffer]

    def reduce(self) -> None:
        self._all_reduce(self._tensor)


KINDS: dict[str, Any] = {
    "ours": Ours,
    "chainermn": ChainerMN,
    "mpi4py": FlatMPI,
    "torch": FlatGloo,
}


def make_contender(spec: str, shapes: Sequence[tuple[int, ...]]) -> Contender:
    """Make the contender that ``KIND:NAME`` says. Collective."""
    kind, _, name = spec.partition(":")
    return KINDS[kind](name, shapes)


def parse_options(text: str) -> dict[str, Any]:
    """Read ``OPTION=VALUE,...``; a value is a Python literal or else a text."""
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r}: expected OPTION=VALUE")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def flat_buffer(shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return one uninitialised float32 array of as many elements."""
    return np.empty(sum(int(np.prod(shape)) for shape in shapes), np.float32)


def report(entry: Any) -> None:
    """Print all ranks' entries on rank 0, for whoever started the job. Collective."""
    entries = WORLD.gather(entry)
    if WORLD.rank == 0:
        print(f"REPORT {json.dumps(entries)}", flush=True)
