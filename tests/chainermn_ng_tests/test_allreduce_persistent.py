import chainer
import chainer.links as L
import numpy as np
import pytest
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

from chainermn_ng.extensions import AllreducePersistent
from communicators import MismatchError


def link_with(**values):
    link = chainer.Link()
    for name, value in values.items():
        link.add_persistent(name, value)
    return chainer.Sequential(link)


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.reports("chainer/chainermn#62")
def test_floats_are_averaged_and_the_rest_is_left_alone(comm):
    r, mean = comm.rank, (comm.size - 1) / 2
    base = np.arange(6.0).reshape(2, 3)
    strided = np.zeros((4, 6), "f")[::2, ::-2]
    strided[...] = base + r
    model = link_with(
        c_order=(base + r).astype("f"),
        fortran=np.asfortranarray(base + r),
        strided=strided,
        half=np.full(3, 60000 - r, "e"),
        scalar_array=np.array(r, "d"),
        empty=np.zeros((0, 3), "f"),
        complex_array=np.array([r * 1j]),
        float32=np.float32(r),
        python_float=float(r),
        python_complex=complex(0, r),
        integers=np.arange(3) + r,
        int64=np.int64(r),
        python_int=r,
        truth=r == 0,
        truths=np.array([r == 0]),
        text=f"rank {r}",
        nothing=None,
    )
    kept = {
        name: getattr(model[0], name)
        for name in ("c_order", "fortran", "strided", "half", "scalar_array")
    }
    AllreducePersistent(model, comm)()
    link = model[0]
    expected = {
        "c_order": (base + mean).astype("f"),
        "fortran": base + mean,
        "strided": (base + mean).astype("f"),
        "half": np.full(3, 60000 - mean, "d").astype("e"),
        "scalar_array": np.array(mean),
        "empty": np.zeros((0, 3), "f"),
        "complex_array": np.array([mean * 1j]),
        "float32": np.float32(mean),
        "python_float": mean,
        "python_complex": complex(0, mean),
        "integers": np.arange(3) + r,
        "int64": np.int64(r),
        "python_int": r,
        "truth": r == 0,
        "truths": np.array([r == 0]),
        "text": f"rank {r}",
        "nothing": None,
    }
    for name, value in expected.items():
        found = getattr(link, name)
        ok = type(found) is type(value) and np.array_equal(found, value)
        ok = ok and getattr(found, "dtype", None) == getattr(value, "dtype", None)
        assert_all_ranks(comm, bool(ok), f"{name}: {found!r}, expected {value!r}")
    assert all(getattr(link, name) is array for name, array in kept.items())
    assert link.fortran.flags.f_contiguous


@pytest.mark.parallel([2, 3])
def test_running_statistics(comm):
    model = chainer.Sequential(L.BatchNormalization(2), L.BatchNormalization(2))
    model(np.random.RandomState(comm.rank).normal(comm.rank, 1, (5, 2)).astype("f"))
    means = [np.mean(comm.allgather_obj(bn.avg_mean), axis=0) for bn in model]
    # Shared between links: averaged once.
    shared = model[0].avg_var
    model[1].avg_var = shared
    variances = np.mean(comm.allgather_obj(shared), axis=0)
    AllreducePersistent(model, comm)(trainer=None)
    ok = all(np.allclose(bn.avg_mean, m) for bn, m in zip(model, means, strict=True))
    assert_all_ranks(comm, ok and np.allclose(shared, variances))


@pytest.mark.parallel([2, 3])
def test_what_differs_between_ranks_is_named_on_all(comm):
    last = comm.size - 1
    odd = comm.rank == last
    cases = [
        (np.zeros(3 if odd else 2, "f"), "/0/a: numpy array, float32 (2,)"),
        (None if odd else np.zeros(2, "f"), f"absent on rank {last}"),
        (np.zeros(2, "f" if odd else "d"), f"float32 (2,) on rank {last}"),
        (np.float32(1) if odd else 1.0, f"/0/a: float on rank{'s' * (last > 1)} 0"),
    ]
    for value, text in cases:
        average = AllreducePersistent(link_with(a=value), comm)
        assert_all_raise(comm, average, MismatchError, text)
    array = np.zeros(2)
    array.flags.writeable = not odd
    average = AllreducePersistent(link_with(a=array), comm)
    assert_all_raise(comm, average, ValueError, "/0/a is read-only")


@pytest.mark.parallel([1, 2])
def test_defaults_are_those_of_chainermn(comm):
    average = AllreducePersistent(chainer.Sequential(), comm)
    assert average.trigger == (1, "epoch")
    assert average.priority == 301
    average()
