import copy
import random

import chainer
import numpy as np
import pytest
from chainer import iterators
from chainer.training import extensions
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks, same_everywhere

from chainermn_ng.iterators import create_synchronized_iterator
from communicators import MismatchError

KINDS = {
    "serial": iterators.SerialIterator,
    "threads": iterators.MultithreadIterator,
}


def own_data(comm, n_samples=9):
    return [(comm.rank, i) for i in range(n_samples)]


def order_of(batches):
    return [[i for _, i in batch] for batch in batches]


class EvenFirst(iterators.OrderSampler):
    """Shuffles even and odd numbers apart, by the generator that it is given."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, current_order, current_position):
        n = len(current_order)
        permutation = self.generator.permutation
        return np.r_[permutation(range(0, n, 2)), permutation(range(1, n, 2))]


class EvenFirstByNumPy(iterators.OrderSampler):
    def __call__(self, current_order, current_position):
        n = len(current_order)
        shuffled = np.random.permutation(range(0, n, 2))
        return np.r_[shuffled, sorted(range(1, n, 2), key=lambda _: random.random())]


SAMPLERS = {
    "own RandomState": lambda rank: EvenFirst(np.random.RandomState(rank)),
    "own Generator": lambda rank: EvenFirst(np.random.default_rng(rank)),
    "global generators": lambda rank: EvenFirstByNumPy(),
}


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_the_same_and_the_data_are_the_ranks_own(comm, kind):
    # Whatever the ranks draw themselves.
    np.random.seed(comm.rank)
    actual = KINDS[kind](own_data(comm), 4)
    with create_synchronized_iterator(actual, comm) as it:
        batches = [next(it) for _ in range(20)]
        order = order_of(batches)
        ok = all(rank == comm.rank for batch in batches for rank, _ in batch)
        flat = [i for batch in order for i in batch]
        epochs = [flat[at : at + 9] for at in range(0, 72, 9)]
        ok &= all(sorted(epoch) == list(range(9)) for epoch in epochs)
        ok &= len(set(map(tuple, epochs))) == 8
        assert_all_ranks(comm, ok and same_everywhere(comm, order), f"{order}")
        assert (it.epoch, it.batch_size, len(it.dataset)) == (8, 4, 9)
        it.reset()
        again = order_of([next(it) for _ in range(9)])
        ok = same_everywhere(comm, again) and again != order[:9]
        assert_all_ranks(comm, ok and it.epoch == 4, f"{again}")


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_order_sampler_of_ones_own_is_kept(comm, kind, sampler):
    actual = KINDS[kind](own_data(comm), 3, order_sampler=SAMPLERS[sampler](comm.rank))
    with create_synchronized_iterator(actual, comm) as it:
        order = order_of([next(it) for _ in range(12)])
    flat = [i for batch in order for i in batch]
    ok = [[i % 2 for i in flat[at : at + 9]] for at in (0, 9, 18, 27)]
    ok = ok == [[0, 0, 0, 0, 0, 1, 1, 1, 1]] * 4 and flat[:9] != flat[9:18]
    assert_all_ranks(comm, ok and same_everywhere(comm, order), f"{order}")


@pytest.mark.parallel([1, 2])
def test_the_global_generators_are_left_alone(comm):
    def numbers():
        return np.random.random(), random.random()

    for sampler in (None, EvenFirstByNumPy()):
        np.random.seed(comm.rank)
        random.seed(comm.rank)
        actual = iterators.SerialIterator(own_data(comm), 5, order_sampler=sampler)
        expected = np.random.get_state(), random.getstate()
        it = create_synchronized_iterator(actual, comm)
        for _ in range(5):
            next(it)
        ok = random.getstate() == expected[1]
        ok &= repr(np.random.get_state()) == repr(expected[0])
        assert_all_ranks(comm, ok, f"{numbers()}")


@pytest.mark.parallel([1, 2])
def test_numpys_seed_on_rank_0_repeats_the_order(comm):
    def order(seed, sampler_seed=None):
        np.random.seed(seed + comm.rank)
        sampler = None
        if sampler_seed is not None:
            generator = np.random.RandomState(sampler_seed + comm.rank)
            sampler = iterators.ShuffleOrderSampler(generator)
        actual = iterators.SerialIterator(own_data(comm), 9, order_sampler=sampler)
        # As in a program's second run, in which it has the same number.
        comm._n_iterators = 0
        return order_of(next(create_synchronized_iterator(actual, comm)) for _ in "1")

    assert_all_ranks(comm, order(1) == order(1) != order(5))
    assert_all_ranks(comm, order(1, 3) == order(2, 3) != order(2, 7))


@pytest.mark.parallel([1, 2])
def test_two_of_them_have_different_orders(comm):
    np.random.seed(0)
    orders = []
    for _ in range(2):
        state = np.random.get_state()
        actual = iterators.SerialIterator(own_data(comm), 9)
        np.random.set_state(state)
        orders.append(order_of([next(create_synchronized_iterator(actual, comm))]))
    assert_all_ranks(comm, orders[0] != orders[1])


@pytest.mark.parallel([1, 2])
def test_without_shuffling_the_order_is_that_of_the_data(comm):
    actual = iterators.SerialIterator(own_data(comm, 4), 2, shuffle=False)
    it = create_synchronized_iterator(actual, comm)
    order = order_of([next(it) for _ in range(3)])
    assert_all_ranks(comm, order == [[0, 1], [2, 3], [0, 1]])
    target = {}
    it.serialize(chainer.serializers.DictionarySerializer(target))
    next(it)
    it.serialize(chainer.serializers.NpzDeserializer(target))
    assert_all_ranks(comm, order_of([next(it)]) == [[2, 3]])


@pytest.mark.reports("chainer/chainer#3754")
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [None, *SAMPLERS])
def test_resume_goes_on_as_the_unbroken_run_would(comm, kind, sampler):
    def create(seed):
        np.random.seed(seed + comm.rank)
        own = None if sampler is None else SAMPLERS[sampler](seed + comm.rank)
        actual = KINDS[kind](own_data(comm, 7), 3, order_sampler=own)
        return create_synchronized_iterator(actual, comm)

    it = create(1)
    before = [next(it) for _ in range(4)]
    # An unbroken run that saves nothing.
    unbroken = copy.copy(it)
    unbroken_batches = [next(unbroken) for _ in range(9)]
    target = {}
    it.serialize(chainer.serializers.DictionarySerializer(target))
    batches = [next(it) for _ in range(9)]
    again = create(5)
    next(again)
    again.serialize(chainer.serializers.NpzDeserializer(target))
    resumed = [next(again) for _ in range(9)]
    ok = batches == resumed == unbroken_batches and again.epoch == it.epoch
    assert_all_ranks(comm, ok, f"{before} {batches} {resumed} {unbroken_batches}")
    for each in (it, unbroken, again):
        each.finalize()


@pytest.mark.parallel([1, 2])
def test_a_snapshot_without_the_generator_is_loaded_with_a_warning(comm):
    plain = iterators.SerialIterator(own_data(comm), 2)
    next(plain)
    target = {}
    plain.serialize(chainer.serializers.DictionarySerializer(target))
    it = create_synchronized_iterator(iterators.SerialIterator(own_data(comm), 2), comm)
    with pytest.warns(UserWarning, match="generator of the order"):
        it.serialize(chainer.serializers.NpzDeserializer(target))
    assert_all_ranks(comm, next(it) == next(plain))


@pytest.mark.parallel([2, 3])
def test_mistakes_are_errors_on_all(comm):
    def create(n=4, batch_size=2, cls=iterators.SerialIterator, **kwargs):
        actual = cls(own_data(comm, n), batch_size, **kwargs)
        return lambda: create_synchronized_iterator(actual, comm)

    last = comm.rank == comm.size - 1
    for kwargs, text in (
        ({"n": 4 + last}, "5 samples"),
        ({"batch_size": 2 + last}, "batches of 3"),
        ({"shuffle": not last}, "in order"),
    ):
        assert_all_raise(comm, create(**kwargs), MismatchError, text)
    no_iterator = [1, 2] if last else iterators.SerialIterator([1, 2], 1)
    assert_all_raise(
        comm,
        lambda: create_synchronized_iterator(no_iterator, comm),
        ValueError,
        "order_sampler",
        "list",
    )
    sampler = EvenFirst(np.random)
    assert_all_raise(comm, create(order_sampler=sampler), TypeError, "pickle")


class Mean(chainer.Chain):
    def forward(self, x):
        chainer.report({"mean": x.mean()}, self)


@pytest.mark.parallel([1, 2])
def test_in_an_evaluator_and_as_an_iterator_of_its_kind(comm):
    data = np.arange(5, dtype="f") + comm.rank
    actual = iterators.SerialIterator(data, 5, repeat=False)
    it = create_synchronized_iterator(actual, comm)
    evaluator = extensions.Evaluator(it, Mean())
    for _ in range(2):
        result = evaluator()["main/mean"]
        assert_all_ranks(comm, result == 2 + comm.rank, f"{result}")
    it.batch_size = 2
    assert (actual.batch_size, it.repeat) == (2, False)
    assert (it.epoch_detail, it.is_new_epoch) == (1, True)
