"""Applying gradients in flight before a model is evaluated, and at the end."""

from __future__ import annotations

import sys

from chainer import training
from chainer.training import extension


class FlushGradients(extension.Extension):
    """Trainer extension that flushes the optimizers of a double-buffered training.

    It calls :meth:`DoubleBufferingOptimizer.flush` of all optimizers of the updater
    after each epoch, before the evaluator and all that writes or reports, and when the
    run ends, unless by an exception. Then no evaluation, snapshot of an epoch or
    finished model lacks a gradient. Attach it on all ranks; without double buffering
    it does nothing.

    Every flush costs one wait for the communication, and the first update after it
    applies nothing. With ``trainer.extend(FlushGradients(), trigger=(10, "epoch"))``
    it happens less often.
    """

    trigger = 1, "epoch"
    #: Above that of Chainer's evaluator.
    priority = extension.PRIORITY_WRITER + 50
    is_collective = True

    def __init__(self) -> None:
        self._trainer: training.Trainer | None = None
        self._outer_error: BaseException | None = None

    def initialize(self, trainer: training.Trainer) -> None:
        """Called by the trainer when its run begins."""
        self._trainer = trainer
        self._outer_error = sys.exception()

    def __call__(self, trainer: training.Trainer) -> None:
        for _, optimizer in sorted(trainer.updater.get_all_optimizers().items()):
            flush = getattr(optimizer, "flush", None)
            if flush is not None:
                flush()

    def finalize(self) -> None:
        """Called by the trainer when its run ends."""
        trainer, self._trainer = self._trainer, None
        # After an exception the other ranks are elsewhere and would not come.
        if trainer is not None and sys.exception() is self._outer_error:
            self(trainer)
        self._outer_error = None
