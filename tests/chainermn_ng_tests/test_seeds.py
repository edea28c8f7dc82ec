import contextlib
import random

import chainer.functions as F
import numpy as np
import pytest
from helpers.chainer_models import same_on_all_ranks
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

from chainermn_ng.seeds import set_seed, shared_seed
from communicators import MismatchError


def draw(comm, seed):
    import chainer.links as L

    set_seed(seed, comm)
    with shared_seed(seed):
        model = L.Linear(4, 4)
    mask = F.dropout(np.ones((8, 8), "f")).array
    return model, (mask.tobytes(), random.random())


@pytest.mark.parallel([1, 2, 3])
def test_weights_alike_and_streams_apart_and_both_repeat(comm):
    model, streams = draw(comm, 42)
    again, same_streams = draw(comm, 42)
    other, other_streams = draw(comm, 43)
    assert_all_ranks(comm, same_on_all_ranks(comm, model))
    masks, numbers = zip(*comm.allgather_obj(streams), strict=True)
    assert len(set(masks)) == len(set(numbers)) == comm.size
    ok = streams == same_streams and (model.W.array == again.W.array).all()
    ok = ok and streams != other_streams and (model.W.array != other.W.array).any()
    assert_all_ranks(comm, bool(ok))


@pytest.mark.parallel([1, 2])
def test_one_process_draws_what_rank_0_draws(comm):
    set_seed(5, comm)
    first = np.random.random()
    set_seed(5)
    assert (np.random.random() == first) == (comm.rank == 0)


@pytest.mark.parallel(2)
def test_the_shared_block_leaves_the_streams_where_they_were(comm):
    set_seed(5, comm)
    expected = np.random.random(), random.random()
    set_seed(5, comm)
    with contextlib.suppress(KeyError), shared_seed(9):
        np.random.random()
        random.random()
        raise KeyError
    assert (np.random.random(), random.random()) == expected


@pytest.mark.parallel([2, 3])
def test_bad_seeds_are_errors_on_all(comm):
    assert_all_raise(comm, lambda: set_seed(comm.rank, comm), MismatchError, "seed=1")
    assert_all_raise(comm, lambda: set_seed(-1, comm), ValueError, "-1")
    assert_all_raise(comm, lambda: set_seed("x", comm), TypeError)
    with pytest.raises(ValueError, match="4294967296"), shared_seed(2**32):
        pass
