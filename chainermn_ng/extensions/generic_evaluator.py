"""Evaluation whose results one rank puts together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import chainer
from chainer.dataset import convert
from chainer.training import extension
from chainer.utils import argument

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.extensions.counting_iterator import CountingIterator
from communicators import CommunicatorBase
from communicators.arguments import check_root

# Batches between two gatherings: the results of so many are kept on each rank.
_ROUND = 8


class GenericMultiNodeEvaluator(extension.Extension):
    """Trainer extension that collects a result for each batch of all ranks at one rank.

    For measures that are no mean over samples, such as BLEU or a mean average
    precision; for means use :func:`~chainermn_ng.create_multi_node_evaluator`. Override
    :meth:`calc_local`, which gives the result of a batch, and :meth:`aggregate`, which
    makes one of all results. Calling it is collective; attach it on all ranks.

    The ranks may have different numbers of batches, or none. Padding samples of
    scattered shards are left out.

    Args:
        comm: communicator of this package, of the engine, or of mpi4py; ``None`` in a
            program of one process.
        iterator: over this rank's samples; does not repeat.
        target: the model.
        device: where the converter puts the batches.
        converter: makes arrays of a batch.
        root: the rank that gets the results.
        progress_hook: called with each batch, at the root only.

    Raises:
        ValueError: no such root.
    """

    trigger = 1, "epoch"
    default_name = "validation"
    priority = extension.PRIORITY_WRITER
    is_collective = True

    name: str | None = None

    def __init__(
        self,
        comm: Any,
        iterator: Any,
        target: Any,
        device: Any = None,
        converter: Callable[..., Any] = convert.concat_examples,
        root: int = 0,
        **kwargs: Any,
    ) -> None:
        (progress_hook,) = argument.parse_kwargs(kwargs, ("progress_hook", None))
        check_root(root, 1 if comm is None else comm.size, "GenericMultiNodeEvaluator")
        self.comm = comm
        self.iterator = iterator
        self._targets = {"main": target}
        self.converter = converter
        self.device = None if device is None else chainer.get_device(device)
        self.root = root
        self._progress_hook = progress_hook
        self._number = ""
        if isinstance(comm, ChainerCommunicator):
            self._number = f" {comm.new_evaluator_number()}"

    def __call__(self, trainer: Any = None) -> Any:
        """Evaluate. Collective.

        Args:
            trainer: ignored.

        Returns:
            At the root what :meth:`aggregate` returns, else ``None``.

        Raises:
            Exception: an error of one rank is raised on all, there as it is, elsewhere
                as TypeError, ValueError, OSError, or RankFailedError.
        """
        if self.comm is None:
            return self.aggregate(list(self._results()))
        with engine_of(self.comm) as engine:
            collected = self._collect(engine)
            result, error = None, None
            if engine.rank == self.root:
                try:
                    result = self.aggregate(collected)
                except Exception as failure:
                    error = failure
            self._agree(engine, "aggregate", error)
        return result

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one batch; by default what the model returns.

        Called without building a graph for backward passes.

        Args:
            args: what the converter made, if a tuple; a single array is one argument.
            kwargs: what it made, if a dictionary.

        Returns:
            Any object that can be pickled; ``None`` is left out of the results.
        """
        return self._targets["main"](*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Return the result of the evaluation; by default the list itself.

        Called at the root only; may report.

        Args:
            results: the first batches of all ranks in the order of the ranks, then the
                second ones, and so on.
        """
        return results

    def _collect(self, engine: CommunicatorBase) -> list[Any]:
        batches = self._results()
        collected: list[Any] = []
        while True:
            mine, error = [], None
            try:
                mine = list(itertools.islice(batches, _ROUND))
            except Exception as failure:
                error = failure
            self._agree(engine, "results", error)
            rows = engine.gather_obj(mine, root=self.root)
            for column in itertools.zip_longest(*(rows or [])):
                collected += [result for result in column if result is not None]
            is_done = len(mine) < _ROUND
            if all(engine.allgather_obj(is_done)):
                return collected

    def _results(self) -> Iterator[Any]:
        iterator = CountingIterator(self.iterator)
        iterator.reset()
        shows_progress = self.comm is None or self.comm.rank == self.root
        for batch in iterator:
            arrays = convert._call_converter(self.converter, batch, self.device)
            with chainer.no_backprop_mode():
                if isinstance(arrays, tuple):
                    result = self.calc_local(*arrays)
                elif isinstance(arrays, dict):
                    result = self.calc_local(**arrays)
                else:
                    result = self.calc_local(arrays)
            if self._progress_hook is not None and shows_progress:
                self._progress_hook(batch)
            yield result

    def _agree(
        self, engine: CommunicatorBase, what: str, error: Exception | None
    ) -> None:
        try:
            kind = type(self).__name__
            engine.agree(f"evaluator{self._number} ({kind}), {what}", error=error)
        except Exception:
            if error is not None:
                raise error from None
            raise
