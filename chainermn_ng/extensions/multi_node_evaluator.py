"""Evaluation of a model on the validation samples of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
from chainer.dataset import convert
from chainer.training import extensions
from chainer.training.extensions import evaluator as chainer_evaluator

from chainermn_ng.communicators import ChainerCommunicator
from chainermn_ng.communicators.factory import engine_of
from chainermn_ng.extensions.counting_iterator import CountingIterator
from chainermn_ng.extensions.weighted_sums import WeightedSums


def create_multi_node_evaluator(
    actual_evaluator: Any, communicator: Any, *, average_of_averages: bool = False
) -> Any:
    """Make an evaluator give the result over the samples of all ranks.

    Its ``evaluate`` becomes collective: attach it on all ranks, or evaluate on one
    rank with an evaluator that was not passed here. Every rank gets the number that
    one process reports for the whole set at once, whatever the shards and the batch
    size: each observation weighs as many samples as its batch has (or the weight
    that it was reported with), padding samples of scattered shards are left out, a
    key that only some ranks report is averaged over those, and a rank without
    samples adds nothing.

    The result of a class that overrides ``evaluate`` weighs the samples that it has
    drawn from its main iterator (from all of them if none from that; one if none at
    all).

    Args:
        actual_evaluator: e.g. :class:`chainer.training.extensions.Evaluator`; changed
            in place.
        communicator: communicator of this package, of the engine, or of mpi4py.
        average_of_averages: give all batches of a rank the same weight, padding
            included, and all ranks that have a result, as ChainerMN does. Right for a
            model whose forward pass communicates: all ranks then run the same number
            of batches.

    Returns:
        ``actual_evaluator``.

    Evaluators are numbered in the order of their creation, which must be the same on
    all ranks.

    Raises:
        TypeError: ``actual_evaluator`` is no evaluator.
        Exception: an error in one rank's evaluation is raised on all, there as it
            is, elsewhere as TypeError, ValueError, OSError, or RankFailedError.
    """
    if not callable(getattr(actual_evaluator, "evaluate", None)):
        raise TypeError(
            "create_multi_node_evaluator: expected an evaluator of Chainer; got "
            f"{type(actual_evaluator).__qualname__}"
        )
    own_evaluate = actual_evaluator.evaluate
    # Ranks that call two evaluators in different orders are told apart by it.
    number = ""
    if isinstance(communicator, ChainerCommunicator):
        number = f" {communicator.new_evaluator_number()}"
    is_overridden = _overrides_evaluate(actual_evaluator)

    def evaluate() -> dict[str, Any]:
        sums, error = WeightedSums(), None
        try:
            if average_of_averages:
                # Over no samples Chainer's iterators divide by zero.
                if not _is_empty(actual_evaluator):
                    sums.add(_checked(own_evaluate()), 1)
            elif is_overridden:
                with _counting_iterators(actual_evaluator) as counters:
                    # Over no samples most means divide by zero.
                    if not _has_no_samples(counters):
                        sums.add(_checked(own_evaluate()), _weight(counters))
            else:
                _evaluate_batches(actual_evaluator, communicator, sums)
        except Exception as failure:
            error = failure
        with engine_of(communicator) as engine:
            try:
                kind = type(actual_evaluator).__name__
                name = getattr(actual_evaluator, "name", None)
                label = f"evaluator{number} ({kind}{f', {name}' if name else ''})"
                engine.agree(label, "", error)
            except Exception:
                if error is not None:
                    raise error from None
                raise
            return sums.mean_over_ranks(engine)

    actual_evaluator.evaluate = evaluate
    actual_evaluator.is_collective = True
    return actual_evaluator


def _overrides_evaluate(evaluator: Any) -> bool:
    if not isinstance(evaluator, extensions.Evaluator):
        return True
    own = "evaluate" in vars(evaluator)
    return own or type(evaluator).evaluate is not extensions.Evaluator.evaluate


def _evaluate_batches(evaluator: Any, communicator: Any, sums: WeightedSums) -> None:
    """Do what Chainer's ``Evaluator.evaluate`` does, adding up by samples."""
    if evaluator.eval_hook:
        evaluator.eval_hook(evaluator)
    iterator = CountingIterator(evaluator.get_iterator("main"))
    iterator.reset()
    function = evaluator.eval_func or evaluator.get_target("main")
    with contextlib.ExitStack() as stack:
        bar = None
        if evaluator._progress_bar and communicator.rank == 0:
            bar = chainer_evaluator._IteratorProgressBar(iterator=iterator)
            stack.callback(bar.close)
        for batch in iterator:
            observation: dict[str, Any] = {}
            with chainer.reporter.report_scope(observation):
                arrays = convert._call_converter(
                    evaluator.converter, batch, evaluator.device
                )
                with chainer.no_backprop_mode():
                    if isinstance(arrays, tuple):
                        function(*arrays)
                    elif isinstance(arrays, dict):
                        function(**arrays)
                    else:
                        function(arrays)
            sums.add(observation, len(batch))
            if bar is not None:
                bar.update()


@contextlib.contextmanager
def _counting_iterators(evaluator: Any) -> Iterator[dict[str, CountingIterator]]:
    """Put counting stand-ins in the place of an evaluator's iterators for a while."""
    originals = getattr(evaluator, "_iterators", None)
    if originals is None:
        yield {}
        return
    counters = {name: CountingIterator(it) for name, it in originals.items()}
    evaluator._iterators = counters
    try:
        yield counters
    finally:
        evaluator._iterators = originals


def _weight(counters: dict[str, CountingIterator]) -> int:
    drawn = {name: counter.n_samples for name, counter in counters.items()}
    if drawn.get("main"):
        return drawn["main"]
    if any(drawn.values()):
        return sum(drawn.values())
    # An evaluator that uses no iterator has one part.
    return 1


def _has_no_samples(counters: dict[str, CountingIterator]) -> bool:
    # An evaluator that uses no iterator is asked all the same.
    return bool(counters) and all(c.has_no_samples for c in counters.values())


def _checked(result: Any) -> dict[str, Any]:
    if not isinstance(result, dict):
        raise TypeError(
            f"evaluate() returned {type(result).__qualname__}; expected a dict of "
            "observations"
        )
    return result


def _is_empty(evaluator: Any) -> bool:
    iterators = getattr(evaluator, "_iterators", {})
    dataset = getattr(iterators.get("main"), "dataset", None)
    return dataset is not None and len(dataset) == 0
