"""Finding out that ranks have drifted apart."""

from __future__ import annotations

from typing import Any

from chainer import training
from chainer.training import extension

from chainermn_ng.optimizers.multi_node_optimizer import MultiNodeOptimizer
from chainermn_ng.optimizers.state_in_step import check_state


class CheckState(extension.Extension):
    """Trainer extension that checks that all ranks hold the same state.

    ``trainer.extend(CheckState())``, on all ranks. Once an epoch it calls
    :func:`chainermn_ng.check_state` for each optimizer of the updater, after
    evaluators and :class:`AllreducePersistent`, and before reports and snapshots. A
    difference ends the training on all ranks, with an error that names it.

    Args:
        comm: communicator for optimizers of Chainer's that are not wrapped by
            :func:`~chainermn_ng.create_multi_node_optimizer`.
        persistents: ``False`` leaves persistent values out.
    """

    trigger = 1, "epoch"
    priority = extension.PRIORITY_WRITER - 1
    is_collective = True

    def __init__(self, comm: Any = None, *, persistents: bool = True) -> None:
        self.comm = comm
        self.persistents = persistents

    def __call__(self, trainer: training.Trainer) -> None:
        """Check now. Collective.

        Raises:
            MismatchError: as in :func:`chainermn_ng.check_state`.
        """
        for _, optimizer in sorted(trainer.updater.get_all_optimizers().items()):
            knows_ranks = isinstance(optimizer, MultiNodeOptimizer)
            comm = None if knows_ranks else self.comm
            check_state(optimizer, comm, persistents=self.persistents)
