import contextlib
import random
import types

import chainer.functions as F
import numpy as np
import pytest
from helpers.chainer_models import same_on_all_ranks
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

from chainermn_ng import devices
from chainermn_ng.seeds import set_seed, shared_seed
from communicators import MismatchError


def draw(comm, seed):
    import chainer.links as L

    set_seed(seed, comm)
    with shared_seed(seed):
        model = L.Linear(4, 4)
    mask = F.dropout(np.ones((8, 8), "f")).array
    return model, (mask.tobytes(), random.random())


@pytest.mark.reports(
    "huggingface/accelerate#114",
    "facebookresearch/fastMRI#123",
    "ecmwf/anemoi-core#595",
)
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


class CupyRandom:
    """What ``cupy.random`` offers for the current device, drawn by NumPy."""

    RandomState = np.random.RandomState

    def __init__(self):
        self.state = self.RandomState(77)

    def get_random_state(self):
        return self.state

    def set_random_state(self, state):
        self.state = state

    def seed(self, seed):
        self.state.seed(seed)

    def rand(self):
        return self.state.rand()


@pytest.fixture
def cupy_random(monkeypatch):
    """Pretend that there is one GPU."""
    module = CupyRandom()
    cuda = types.SimpleNamespace(cupy=types.SimpleNamespace(random=module))
    monkeypatch.setattr(devices, "cuda", cuda)
    monkeypatch.setattr(devices, "why_no_gpu", lambda number: None)
    return module


@pytest.mark.parallel([1, 2])
def test_cupy_draws_apart_outside_and_alike_inside_of_the_block(comm, cupy_random):
    set_seed(5, comm)
    with shared_seed(9):
        inside = cupy_random.rand()
    outside = cupy_random.rand()
    set_seed(5, comm)
    assert_all_ranks(comm, cupy_random.rand() == outside)
    assert_all_ranks(comm, len(set(comm.allgather_obj(inside))) == 1)
    assert_all_ranks(comm, len(set(comm.allgather_obj(outside))) == comm.size)


@pytest.mark.parallel([1, 2])
def test_cupy_without_a_gpu_is_left_alone(comm, cupy_random, monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda number: "no driver")
    # On such a machine each of its functions fails.
    monkeypatch.setattr(devices.cuda.cupy, "random", None)
    set_seed(5, comm)
    with shared_seed(9):
        pass
