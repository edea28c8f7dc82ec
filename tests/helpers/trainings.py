"""Small trainings whose every bit depends on data order and random generators."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.dataset import concat_examples

import chainermn_ng
from helpers.chainer_models import weights


class Net(chainer.Chain):
    """Dropout draws from NumPy's generator; the statistics differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(5, 8)
            self.bn = L.BatchNormalization(8)
            self.l2 = L.Linear(8, 3)

    def forward(self, x: Any, t: Any) -> Any:
        h = F.dropout(F.relu(self.bn(self.l1(x))), 0.3)
        loss = F.softmax_cross_entropy(self.l2(h), t)
        chainer.report({"loss": loss}, self)
        return loss


class Recorder:
    """A data set that notes which batches were trained on.

    Not in which order samples are asked for: threads that load ahead have none.

    Attributes:
        batches: the inputs of each.
    """

    def __init__(self, rank: int, n_samples: int = 11) -> None:
        random = np.random.RandomState(100 + rank)
        self.x = random.normal(size=(n_samples, 5)).astype("f")
        self.t = random.randint(0, 3, n_samples).astype("i")
        self.batches: list[list[list[float]]] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        return self.x[index], self.t[index]

    def convert(self, batch: Any, device: Any) -> Any:
        """Note the batch, and make arrays of it."""
        self.batches.append([x.tolist() for x, _ in batch])
        return concat_examples(batch, device)


def make_trainer(
    comm: Any,
    out: Any,
    n_iterations: int,
    *,
    optimizer: Any = None,
    double_buffering: bool = False,
    make_iterator: Callable[[Any], Any] | None = None,
    n_samples: int = 11,
) -> training.Trainer:
    """Return a trainer with nothing attached; equal for equal arguments."""
    chainermn_ng.set_seed(3, comm)
    model = Net()
    wrapped = chainermn_ng.create_multi_node_optimizer(
        optimizer or chainer.optimizers.MomentumSGD(0.1),
        comm,
        double_buffering=double_buffering,
    )
    wrapped.setup(model)
    data = Recorder(comm.rank, n_samples)
    if make_iterator is None:
        iterator = chainer.iterators.SerialIterator(data, 4)
    else:
        iterator = make_iterator(data)
    updater = training.updaters.StandardUpdater(
        iterator, wrapped, converter=data.convert
    )
    return training.Trainer(updater, (n_iterations, "iteration"), out=str(out))


def state_of(trainer: training.Trainer) -> dict[str, Any]:
    """Return everything that must be bit-identical after a resume, as bytes."""
    optimizer = trainer.updater.get_optimizer("main")
    iterator = trainer.updater.get_iterator("main")
    state = {k: v.tobytes() for k, v in weights(optimizer.target).items()}
    for name, parameter in optimizer.target.namedparams():
        for key, value in (parameter.update_rule.state or {}).items():
            state[f"{name}:{key}"] = np.asarray(value).tobytes()
    state["statistics"] = optimizer.target.bn.avg_mean.tobytes()
    state["t"] = optimizer.t
    state["rate"] = optimizer.lr if hasattr(optimizer, "lr") else optimizer.alpha
    state["order"] = iterator._state.order.tobytes()
    state["position"] = iterator.epoch_detail
    state["next numbers"] = np.random.get_state()[1].tobytes()
    state["iteration"] = trainer.updater.iteration
    return state


def differences(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return the names of what differs between two states."""
    return ", ".join(sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)))


def recorded(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Call a function; return its result and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in caught]


def shared_folder(comm: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return rank 0's temporary folder on all ranks."""
    return pathlib.Path(comm.bcast_obj(str(tmp_path)))


def names_in(folder: pathlib.Path) -> list[str]:
    """Return the names of a folder's entries, sorted."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def log_of(folder: pathlib.Path) -> list[Any]:
    """Return what LogReport has written."""
    return json.loads((folder / "log").read_text())
