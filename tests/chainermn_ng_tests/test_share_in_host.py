import gc
import pathlib
import warnings

import numpy as np
import pytest
from chainer import datasets
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from chainermn_ng.communicators import create_communicator
from chainermn_ng.datasets import padding_mask, scatter_dataset, share_in_host
from communicators import MismatchError


def shared_bytes():
    """Return inode and bytes of each piece of shared memory that this process maps."""
    gc.collect()
    found = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if "memfd:chainermn_ng" in line:
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            found.append((line.split()[4], end - begin))
    return found


def is_shared(array):
    return not array.flags.writeable and array.flags.aligned


X = np.random.RandomState(0).normal(size=(9, 3)).astype("f")
T = np.arange(9, dtype="i2")
KINDS = {
    "array": X,
    "Fortran order": np.asfortranarray(X),
    "float16, scalar": np.array(3, "e"),
    "no elements": np.empty((0, 4), "i"),
    "tuple": (X, T),
    "list of samples": [(x, int(t)) for x, t in zip(X, T, strict=True)],
    "dictionary": {"x": X, "name": "training"},
    "TupleDataset": datasets.TupleDataset(X, T),
    "DictDataset": datasets.DictDataset(x=X, t=T),
    "SubDataset": datasets.SubDataset(X, 2, 7),
    "views with gaps": X[:, ::2],
    "no arrays": ["a", 1, None],
}


@pytest.mark.reports(
    "chainer/chainermn#208", "masayoshi-ogura/HDNNP#181", "chainer/chainer#7544"
)
@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("from_one", [False, True])
def test_data_of_any_kind_arrive_as_they_are(comm, kind, from_one):
    root = comm.size - 1 if from_one else None
    has_data = comm.rank == (root if from_one else 0)
    data = share_in_host(comm, KINDS[kind] if has_data else None, root)
    ok = type(data) is type(KINDS[kind]) and text_of(data) == text_of(KINDS[kind])
    assert_all_ranks(comm, ok, f"{data!r}")


def text_of(data):
    if isinstance(data, np.ndarray | dict):
        order = getattr(getattr(data, "flags", None), "f_contiguous", None)
        return repr(data), order
    return repr([data[i] for i in range(len(data))])


@pytest.mark.reports(
    "chainer/chainermn#208", "masayoshi-ogura/HDNNP#181", "chainer/chainer#7544"
)
@pytest.mark.parallel([2, 3, 4])
def test_one_copy_a_host(comm):
    n_bytes = 4_000_000
    data = None
    if comm.rank == 0:
        x = np.arange(n_bytes // 4, dtype="f").reshape(1000, -1)
        data = datasets.TupleDataset(x, np.arange(1000))
    before = comm.sent_bytes["messages"]
    shard = scatter_dataset(data, comm, shuffle=True, seed=1, shared_memory=True)
    sent = comm.sent_bytes["messages"] - before
    assert_all_ranks(comm, sent < 100_000, f"{sent} bytes")
    found = comm.allgather_obj(shared_bytes())
    # All of them map one and the same file, which holds the set once.
    ok = found == [found[0]] * comm.size and len(found[0]) == 1
    ok &= n_bytes < found[0][0][1] < n_bytes + 20_000
    assert_all_ranks(comm, ok, f"{found}")
    sample, number = shard[0]
    ok = number == shard.indices[0] and sample[0] == number * (n_bytes // 4000)
    assert_all_ranks(comm, ok and is_shared(sample), f"{shard[0]}")
    parts = comm.allgather_obj(shard.indices[padding_of(shard)].tolist())
    assert sorted(i for part in parts for i in part) == list(range(1000))
    with pytest.raises(ValueError, match="read-only"):
        sample += 1
    del shard, sample
    assert shared_bytes() == []


def padding_of(shard):
    mask = padding_mask(shard)
    return slice(None) if mask is None else ~mask


@pytest.mark.parallel([2, 3])
def test_real_machines_decide_and_the_arrays_outlive_the_communicator():
    size = MPI.COMM_WORLD.size
    with create_communicator("flat", topology=f"{size}x1", timeout_s=30) as comm:
        assert comm.intra_size == 1
        x = share_in_host(comm, X if comm.rank == 0 else None)
        found = comm.allgather_obj(shared_bytes())
        assert_all_ranks(comm, found == [found[0]] * size, f"{found}")
    assert (x == X).all()


@pytest.mark.parallel([1, 2])
def test_other_kinds_of_communicators(comm):
    for given in (comm.engine, MPI.COMM_WORLD):
        x = share_in_host(given, X if comm.rank == 0 else None, root=0)
        assert_all_ranks(comm, (x == X).all() and is_shared(x))


class Unloadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parallel([1, 2, 3])
def test_mistakes_are_errors_on_all(comm):
    last = comm.size - 1

    def share(data, root=None):
        return lambda: share_in_host(comm, data, root)

    assert_all_raise(comm, share(lambda: 1, last), TypeError, "pickle", "lambda")
    assert_all_raise(comm, share(lambda: 1), TypeError, "pickle", "lambda")
    assert_all_raise(comm, share(Unloadable()), TypeError, "unpickle", "no number")
    assert_all_raise(comm, share(X, comm.size), ValueError, "root")
    both = {"shared_memory": True, "in_memory": True}
    scatter = lambda: scatter_dataset(X, comm, **both)  # noqa: E731
    assert_all_raise(comm, scatter, ValueError, "not both")
    if comm.size > 1:
        assert_all_raise(comm, share(X, comm.rank % 2), MismatchError, "root=1")
        scatter = lambda: scatter_dataset(  # noqa: E731
            X, comm, shared_memory=comm.rank == 0
        )
        assert_all_raise(comm, scatter, MismatchError, "shared_memory=True")


@pytest.mark.parallel(2)
def test_data_that_are_not_shared_are_warned_of(comm, monkeypatch):
    monkeypatch.setattr("chainermn_ng.datasets.shared._LARGE_BYTES", 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        share_in_host(comm, list(range(100)), 0)
        share_in_host(comm, np.arange(1000), 0)
    texts = [str(w.message) for w in caught]
    ok = len(texts) == (comm.rank == 0) and all("no contiguous" in t for t in texts)
    assert_all_ranks(comm, ok, f"{texts}")
