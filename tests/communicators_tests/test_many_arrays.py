"""allreduce_arrays and bcast_arrays: what gradients and weights travel by."""

from __future__ import annotations

import numpy as np
import pytest
from communicators_tests.conftest import TOPOLOGIES, create_or_refuse
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from communicators import (
    ArraySpec,
    CommunicatorError,
    MismatchError,
    create_communicator,
)
from communicators.devices import host
from communicators.registry import available_communicators

parallel = pytest.mark.parallel([1, 2, 3, 4])
AVERAGING = [name for name in available_communicators() if name != "dummy"]


def gradients(rank: int) -> list[np.ndarray]:
    """Return arrays of several dtypes, shapes and layouts, filled with rank + 1."""
    return [
        np.full((3, 4), rank + 1, "f4"),
        np.asfortranarray(np.full((5, 2), rank + 1, "f8")),
        np.full((6, 6), rank + 1, "f2")[::2, 1::3],
        np.full((), rank + 1, "f4"),
        np.empty((0, 3), "f4"),
        np.full(1001, rank + 1, "f4").T,
        np.full(2, rank + 1, "c8"),
    ]


@pytest.mark.reports("chainer/chainer#5732", "chainer/chainer#6330")
@parallel
@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("bucket_bytes", [0, 64, 4096, 1 << 22])
def test_mean_is_written_in_place_with_dtypes_kept(name, bucket_bytes):
    options = {} if name == "naive" else {"bucket_bytes": bucket_bytes}
    with create_communicator(name, timeout_s=60, **options) as comm:
        arrays = gradients(comm.rank)
        dtypes = [array.dtype for array in arrays]
        for _ in range(3):
            for array in arrays:
                array[...] = comm.rank + 1
            out = comm.allreduce_arrays(arrays)
            mean = (comm.size + 1) / 2
            ok = all(a is b for a, b in zip(out, arrays, strict=True))
            ok = ok and [array.dtype for array in arrays] == dtypes
            ok = ok and all(np.allclose(array, mean, rtol=1e-3) for array in arrays)
            assert_all_ranks(comm, ok, f"{arrays}")


@parallel
def test_dummy_packs_scales_and_sends_nothing():
    with create_communicator("dummy") as comm:
        arrays = gradients(comm.rank)
        before = sum(comm.sent_bytes.values())
        comm.allreduce_arrays(arrays)
        own = (comm.rank + 1) / comm.size
        ok = all(np.allclose(array, own, rtol=1e-3) for array in arrays)
        sent = sum(comm.sent_bytes.values()) - before
        assert_all_ranks(comm, ok and sent == 0, f"{arrays}, {sent} bytes")


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.parametrize("name", AVERAGING)
def test_mean_on_every_topology_is_the_same_bit_by_bit(name):
    size = create_communicator("naive").size
    for topology in TOPOLOGIES[size]:
        try:
            comm = create_or_refuse(name, topology)
        except pytest.skip.Exception:
            continue
        with comm:
            for n_elems in (1, 3, 7, 100_003):
                random = np.random.RandomState(comm.rank)
                array = random.randn(n_elems).astype("f4")
                comm.allreduce_arrays([array])
                bits = comm.mpi_comm.allgather(array.tobytes())
                rows = [
                    np.random.RandomState(r).randn(n_elems).astype("f4")
                    for r in range(size)
                ]
                ok = np.allclose(array, np.mean(rows, axis=0), atol=1e-5)
                ok = ok and len(set(bits)) == 1
                assert_all_ranks(comm, ok, f"{name} on {topology}, {n_elems}")


@parallel
@pytest.mark.parametrize("wire", ["float16", "float32", "float64"])
def test_the_wire_dtype_halves_or_doubles_the_bytes_and_arrays_keep_theirs(wire):
    # Between hosts: ranks of one host copy the arrays themselves.
    apart = [f"host {r}" for r in range(MPI.COMM_WORLD.size)]
    with create_communicator("flat", allreduce_grad_dtype=wire, topology=apart) as comm:
        arrays = [np.full(64 * comm.size, 1.5 + comm.rank, d) for d in ("f4", "f8")]
        comm.allreduce_arrays(arrays)
        mean = 1.5 + (comm.size - 1) / 2
        ok = [array.dtype.char for array in arrays] == ["f", "d"]
        ok = ok and all((array == mean).all() for array in arrays)
        assert_all_ranks(comm, ok, f"{arrays}")
        n_wire = 2 * 64 * comm.size * np.dtype(wire).itemsize
        expected = 2 * (comm.size - 1) * n_wire // comm.size
        sent = comm.sent_bytes["world"]
        assert_all_ranks(comm, sent == expected, f"{sent} instead of {expected}")


@parallel
@pytest.mark.parametrize("wire", [None, "float16"])
def test_large_halves_stay_finite(wire):
    with create_communicator("flat", allreduce_grad_dtype=wire) as comm:
        array = np.full(10, 40000, "f2")
        comm.allreduce_arrays([array])
        ok = np.isfinite(array).all() and np.allclose(array, 40000, rtol=2e-3)
        assert_all_ranks(comm, ok, f"{array}")


@pytest.mark.parallel([2, 3])
def test_an_array_that_some_ranks_lack_counts_as_zeros(comm):
    if comm.name == "dummy":
        pytest.skip("dummy does not average")
    spec = ArraySpec((2, 2), np.dtype("f4"))
    first = np.full((2, 2), 6.0, "f4") if comm.rank == 0 else spec
    out = comm.allreduce_arrays(
        [first, spec, np.ones(1)], names=["some", "none", "all"]
    )
    ok = out[0] is not None and (out[0] == 6 / comm.size).all()
    ok = ok and out[0].dtype == "f4" and out[1] is None and out[2] is not None
    assert_all_ranks(comm, ok, f"{out}")


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ("shape", ["/l/W", "(3, 2)", "(3, 4)", "rank 1"]),
        ("dtype", ["/l/W", "float32", "float64", "rank 1"]),
        ("name", ["/l/W", "/l/V", "absent", "rank 1"]),
        ("fewer", ["/l/b", "absent", "rank 1"]),
        ("order", ["another order"]),
        ("label", ["step 1", "step 2", "rank 1"]),
    ],
)
def test_a_difference_names_the_array_and_the_ranks_and_changes_nothing(
    flat, change, texts
):
    bad = flat.rank == 1
    names = ["/l/W", "/l/b"]
    arrays = [np.full((3, 2), flat.rank, "f4"), np.full(2, flat.rank, "f4")]
    label = "step 1"
    if bad and change == "shape":
        arrays[0] = np.ones((3, 4), "f4")
    elif bad and change == "dtype":
        arrays[0] = arrays[0].astype("f8")
    elif bad and change == "name":
        names[0] = "/l/V"
    elif bad and change == "fewer":
        names, arrays = names[:1], arrays[:1]
    elif bad and change == "order":
        names, arrays = names[::-1], arrays[::-1]
    elif bad and change == "label":
        label = "step 2"
    before = [array.copy() for array in arrays]
    caught = ""
    try:
        flat.allreduce_arrays(arrays, names=names, label=label)
    except MismatchError as error:
        caught = str(error)
    assert_all_ranks(flat, all(text in caught for text in texts), caught)
    unchanged = all(map(np.array_equal, arrays, before))
    assert_all_ranks(flat, unchanged, "changed in spite of the error")
    flat.barrier()


@pytest.mark.parallel([2])
@pytest.mark.parametrize("case", ["read-only", "list", "int mean", "names", "max"])
def test_arrays_that_cannot_be_reduced_raise_on_all(flat, case):
    array: object = np.ones(2)
    names = None
    op = "mean"
    if case == "int mean":
        array = np.ones(2, "i4")
    elif case == "max":
        op, array = "max", ArraySpec((2,), np.dtype("f8"))
    elif flat.rank == 1:
        if case == "read-only":
            array.flags.writeable = False  # type: ignore[attr-defined]
        elif case == "list":
            array = [1.0, 2.0]
        elif case == "names":
            names = ["a", "b"]
    caught = None
    try:
        flat.allreduce_arrays([array], op, names=names)
    except (TypeError, ValueError) as error:
        caught = error
    assert_all_ranks(flat, caught is not None, "no error")
    flat.barrier()


@parallel
@pytest.mark.parametrize("root", [0, -1])
def test_bcast_arrays_copies_into_any_layout(comm, root):
    root = root % comm.size
    arrays = [*gradients(comm.rank), np.array([comm.rank] * 3, "i8")[::-1]]
    masks = np.array([comm.rank % 2 == 0, True])
    comm.bcast_arrays([*arrays, masks], root=root)
    ok = all((array == root + 1).all() for array in arrays[:-1])
    ok = ok and (arrays[-1] == root).all() and masks[0] == (root % 2 == 0)
    assert_all_ranks(comm, ok, f"{arrays}")


@pytest.mark.parallel([2])
def test_bcast_arrays_of_other_shapes_raise_on_all(flat):
    array = np.ones(2 + flat.rank)
    with pytest.raises(MismatchError, match=r"W: shape \(2,\) .* rank 0, shape \(3,\)"):
        flat.bcast_arrays([array], names=["W"])
    flat.barrier()


@parallel
def test_a_scalar_cannot_be_written_in_place(flat):
    with pytest.raises(TypeError, match="b is a scalar of NumPy"):
        flat.allreduce_arrays([np.zeros(2), np.float32(1)], names=["a", "b"])


@parallel
@pytest.mark.parametrize("name", ["flat", "multi_ring", "hierarchical"])
def test_groups_have_the_bits_of_calls_of_their_own(name):
    size = MPI.COMM_WORLD.size
    with create_communicator(name, topology=f"{size}x1") as comm:

        def arrays():
            rng = np.random.default_rng(comm.rank)
            return [rng.standard_normal(n).astype("f4") for n in (50, 7, 1000, 3, 81)]

        one, many = arrays(), arrays()
        comm.allreduce_arrays(one, groups=[2, 1, 0, 2])
        for part in (slice(0, 2), slice(2, 3), slice(3, 5)):
            comm.allreduce_arrays(many[part])
        same = all(map(np.array_equal, one, many))
        assert_all_ranks(comm, same, name)


@parallel
def test_groups_that_do_not_fit_are_an_error_on_all_ranks(flat):
    with pytest.raises(ValueError, match=r"groups of \[1, 2\] arrays; there are 2"):
        flat.allreduce_arrays([np.zeros(2), np.zeros(3)], groups=[1, 2])
    if flat.size > 1:
        groups = [1, 1] if flat.rank else [2]
        with pytest.raises(MismatchError, match="in groups of 1, 1"):
            flat.allreduce_arrays([np.zeros(2), np.zeros(3)], groups=groups)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("case", ["read-only", "twice", "overlapping", "dtype", "one"])
def test_a_call_that_was_made_before_is_looked_at_again(flat, case):
    def arrays() -> list[np.ndarray]:
        return [np.full(5, flat.rank + 1.0), np.full(5, flat.rank + 1.0)]

    for _ in range(2):
        again = arrays()
        flat.allreduce_arrays(again, label="repeated")
        assert_all_ranks(flat, np.allclose(again, 1.5))
    changed = arrays()
    expected: tuple[str, ...] = ()
    if case == "read-only" and flat.rank == 1:
        changed[1].flags.writeable = False
    if case == "twice":
        changed[1] = changed[0]
    if case == "overlapping":
        memory = np.full(8, flat.rank + 1.0)
        changed = [memory[:5], memory[3:]]
    if case == "dtype":
        changed[1] = changed[1].astype("f4")
    if case == "one" and flat.rank == 1:
        changed[1] = np.full(6, 2.0)
    expected = {
        "read-only": ("ValueError", "array 1 is read-only"),
        "twice": ("ValueError", "are the same array"),
        "one": ("MismatchError", "array 1"),
    }.get(case, ())
    try:
        flat.allreduce_arrays(changed, label="repeated")
    except (ValueError, MismatchError) as error:
        ok = bool(expected) and type(error).__name__ == expected[0]
        assert_all_ranks(flat, ok and expected[1] in str(error), f"{error!r}")
    else:
        ok = not expected and all(np.allclose(array, 1.5) for array in changed)
        assert_all_ranks(flat, ok, f"{changed}")


class _Odd:
    @property
    def shape(self) -> None:
        raise RuntimeError("no shape today")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"arrays": None}, "TypeError: 'NoneType' object is not iterable"),
        ({"arrays": [_Odd()]}, "no shape today|expected a NumPy or CuPy array"),
        ({"groups": 2}, "groups 2: expected numbers of arrays"),
        ({"groups": [[1, 1]]}, "expected numbers of arrays"),
        ({"op": ["mean"]}, "unknown op"),
        ({"names": 3}, "'int' object is not iterable"),
    ],
)
def test_what_cannot_even_be_looked_at_raises_on_all(flat, bad, error, is_known):
    arrays = [np.ones(3), np.ones(4)]
    if is_known:
        flat.allreduce_arrays(arrays)
    call = {"arrays": arrays, **(bad if flat.rank == 1 else {})}
    with pytest.raises((TypeError, ValueError, CommunicatorError), match=error):
        flat.allreduce_arrays(**call)
    flat.barrier()


@pytest.mark.parallel([2])
def test_any_iterable_of_arrays_will_do(flat):
    for _ in range(2):
        memory = np.full(8, flat.rank + 1.0)
        views = {"a": memory[:5], "b": memory[3:]}
        out = flat.allreduce_arrays(views.values(), names=views.keys())
        ok = (memory == 1.5).all() and out[0] is views["a"]
        arrays = [np.full(2, flat.rank + 1.0), np.full(3, flat.rank + 1.0)]
        flat.allreduce_arrays((array for array in arrays), names=iter("ab"))
        ok = ok and all((array == 1.5).all() for array in arrays)
        assert_all_ranks(flat, ok, f"{memory} {arrays}")


@pytest.mark.parallel([2])
def test_names_are_told_apart_by_their_text(flat):
    arrays = [np.ones(2), np.ones(3)]
    names = [1, 2] if flat.rank else [1.0, 2.0]
    with pytest.raises(MismatchError, match=r"1\.0: .*absent"):
        flat.allreduce_arrays(arrays, names=names)
    flat.allreduce_arrays(arrays, names=[1, 2])


@pytest.mark.parallel([2])
def test_what_is_kept_of_calls_is_bounded(flat):
    for i in range(200):
        arrays = [np.zeros(2) if i >> bit & 1 else np.zeros(4)[:2] for bit in range(8)]
        flat.allreduce_arrays(arrays)
        missing = ArraySpec((3,), np.dtype("f4"))
        held = [np.ones(3, "f4") if i >> bit & 1 else missing for bit in range(8)]
        flat.allreduce_arrays(held if flat.rank else [missing] * 8)
    calls = flat._many._calls
    kept = [calls._by_key, calls._by_specs, *(c._plans for c in calls._by_key.values())]
    assert_all_ranks(flat, max(map(len, kept)) <= 64, f"{list(map(len, kept))}")


@pytest.mark.parallel([2])
@pytest.mark.parametrize("name", ["two_dimensional", "hierarchical", "multi_ring"])
def test_a_matrix_is_cut_like_any_array(name):
    with create_communicator(
        name, topology="2x1", bucket_bytes=512, timeout_s=60
    ) as comm:
        matrix = np.full((3, 500), comm.rank + 1.0).view(np.matrix)
        comm.allreduce_arrays([matrix])
        assert_all_ranks(comm, bool((matrix == 1.5).all()), f"{matrix}")


def test_one_rank_alone_stays_in_step_after_an_error(monkeypatch):
    with create_communicator("flat", allreduce_grad_dtype="float16") as comm:
        with monkeypatch.context() as patch:
            patch.setattr(host, "pack", lambda *args: [][1])
            with pytest.raises(IndexError):
                comm.allreduce_arrays([np.ones(3)])
        assert comm.is_usable
        comm.allreduce_arrays([np.ones(3)])
