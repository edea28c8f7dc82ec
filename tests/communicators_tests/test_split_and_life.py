"""Sub-groups, ranks on hosts, and the end of a communicator."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from helpers.jobs import run_job
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

from communicators import (
    CommunicatorError,
    MismatchError,
    TopologyError,
    create_communicator,
)


@pytest.mark.reports(
    "horovod/horovod#105", "horovod/horovod#2139", "chainer/chainermn#121"
)
@pytest.mark.parallel([4])
def test_split_by_parity_inherits_settings_and_topology():
    with create_communicator(
        "multi_ring",
        topology="2x2",
        allreduce_grad_dtype="float16",
        bucket_bytes=1000,
        timeout_s=55,
        n_chunks=3,
    ) as comm:
        part = comm.split(comm.rank % 2, comm.rank)
        ok = part.size == 2 and part.rank == comm.rank // 2
        ok = ok and type(part) is type(comm) and part.options["n_chunks"] == 3
        ok = ok and part.allreduce_grad_dtype == np.float16
        ok = ok and (part.bucket_bytes, part.timeout_s) == (1000, 55)
        ok = ok and str(part.topology) == "2x1" and part.inter_size == 2
        total = part.allreduce(np.array(comm.rank))
        ok = ok and total == (2 if comm.rank % 2 == 0 else 4)
        assert_all_ranks(comm, ok, f"{part.options} {total}")
        part.finalize()


@pytest.mark.parallel([4])
def test_split_keeps_dims_if_all_ranks_stay_in_their_order():
    with create_communicator("multi_ring", topology="3+1", dims="2x2") as comm:
        same = comm.split(0, comm.rank)
        ok = same.dims == (2, 2) and same.allreduce(np.array(1)) == 4
        assert_all_ranks(comm, ok, f"{same.dims}")
        same.finalize()
    with create_communicator("multi_ring", topology="2x2", dims="4") as comm:
        turned = comm.split(0, -comm.rank)
        assert_all_ranks(comm, turned.dims == (2, 2), f"{turned.dims}")
        turned.finalize()


@pytest.mark.parallel([1, 2])
def test_this_mpi_lets_several_threads_call_it():
    with create_communicator("naive") as comm:
        assert_all_ranks(comm, comm.thread_level == "multiple", comm.thread_level)


@pytest.mark.parallel([4])
@pytest.mark.parametrize("undefined", [None, MPI.UNDEFINED])
def test_ranks_without_a_colour_join_none(comm, undefined):
    part = comm.split(undefined if comm.rank == 2 else 0, -comm.rank)
    if comm.rank == 2:
        assert_all_ranks(comm, part is None)
        return
    order = {3: 0, 1: 1, 0: 2}
    ok = part.size == 3 and part.rank == order[comm.rank]
    ok = ok and part.allreduce(np.ones(1))[0] == 3
    part.finalize()
    assert_all_ranks(comm, ok)


@pytest.mark.reports(
    "aws/sagemaker-python-sdk#138", "open-mpi/ompi#13317", "chainer/chainermn#166"
)
@pytest.mark.parallel([4])
@pytest.mark.parametrize(
    ("topology", "intra", "inter", "intra_sizes"),
    [
        ("a,a,b,b", [0, 1, 0, 1], [0, 0, 1, 1], [2, 2, 2, 2]),
        ("a,b,a,b", [0, 0, 1, 1], [0, 1, 0, 1], [2, 2, 2, 2]),
        ("a,a,a,b", [0, 1, 2, 0], [0, 0, 0, 1], [3, 3, 3, 1]),
    ],
)
def test_ranks_follow_the_node_map(topology, intra, inter, intra_sizes):
    with create_communicator("naive", topology=topology) as comm:
        got = comm.allgather_obj((comm.intra_rank, comm.inter_rank, comm.intra_size))
        expected = list(zip(intra, inter, intra_sizes, strict=True))
        assert_all_ranks(comm, got == expected, f"{got}")


@pytest.mark.parallel([4])
def test_topology_from_the_environment(monkeypatch):
    monkeypatch.setenv("CHAINERMN_NG_TOPOLOGY", "3+1")
    with create_communicator("naive") as comm:
        assert_all_ranks(comm, comm.topology.host_sizes == (3, 1))
    with create_communicator("naive", topology="2x2") as comm:
        assert_all_ranks(comm, comm.inter_size == 2)


@pytest.mark.parallel([2, 4])
def test_device_rank_is_unique_on_the_machine_also_after_split():
    # All ranks of this test share one machine, whatever is pretended.
    with create_communicator("naive", topology=f"{MPI.COMM_WORLD.size}x1") as comm:
        part = comm.split(comm.rank % 2, 0)
        numbers = comm.allgather_obj(part.world_intra_rank)
        assert_all_ranks(comm, numbers == list(range(comm.size)), f"{numbers}")
        part.finalize()


@pytest.mark.parallel([3])
def test_topologies_that_differ_between_ranks_raise_on_all():
    rank = MPI.COMM_WORLD.rank
    with pytest.raises(MismatchError, match=r"topology 1x3 on ranks 0, 2; .*3x1"):
        create_communicator("naive", topology="3x1" if rank == 1 else "1x3")


@pytest.mark.parallel([3])
def test_a_wrong_topology_on_one_rank_raises_on_all():
    rank = MPI.COMM_WORLD.rank
    with pytest.raises(TopologyError, match=r"rank 1: .*describes 4 ranks"):
        create_communicator("naive", topology="2x2" if rank == 1 else "1x3")


@pytest.mark.parallel([4])
@pytest.mark.parametrize("dims", ["2x2", (4,), (2, 2), "4x1"])
def test_explicit_dims_work_on_unequal_hosts(dims):
    with create_communicator("multi_ring", topology="3+1", dims=dims) as comm:
        got = comm.allreduce(np.arange(7.0) + comm.rank)
        ok = np.array_equal(got, 4 * np.arange(7.0) + 6)
        assert_all_ranks(comm, ok, f"{got}")


@pytest.mark.parallel([4])
def test_dims_with_another_product_raise_on_all():
    with pytest.raises(TopologyError, match="number of ranks, 4"):
        create_communicator("multi_ring", dims="3x2")


@pytest.mark.parallel([2])
def test_dims_that_differ_between_ranks_raise_on_all():
    rank = MPI.COMM_WORLD.rank
    with pytest.raises(MismatchError, match="n_chunks"):
        create_communicator("multi_ring", n_chunks=1 + rank)


@pytest.mark.parallel([1, 2])
def test_finalize_twice_and_after_an_exception(comm):
    with pytest.raises(KeyError), create_communicator("flat"):
        raise KeyError("not hidden by a collective")
    comm.finalize()
    comm.finalize()


@pytest.mark.parallel([2])
def test_many_short_lives_do_not_exhaust_mpi():
    # An MPI has a few thousand communicators at most.
    for _ in range(400):
        with create_communicator("two_dimensional") as comm:
            part = comm.split(0, comm.rank)
            part.finalize()


@pytest.mark.reports("open-mpi/ompi#2025")
@pytest.mark.parallel([2, 3])
def test_ranks_may_have_communicators_of_their_own():
    # An MPI numbers its communicators: so the free numbers differ between the ranks.
    random = np.random.default_rng(MPI.COMM_WORLD.rank)
    own = []
    for _ in range(300):
        while random.random() < 0.4:
            own.append(MPI.COMM_SELF.Dup())
        while own and random.random() < 0.4:
            own.pop(random.integers(len(own))).Free()
        create_communicator("flat", timeout_s=30).finalize()
    for alone in own:
        alone.Free()


@pytest.mark.parallel([3])
def test_agree_is_public_and_names_the_failed_rank(flat):
    with pytest.raises(OSError, match="loading failed on rank 2: FileNotFoundError"):
        flat.agree("loading", error=FileNotFoundError("x") if flat.rank == 2 else None)
    with pytest.raises(MismatchError, match="epoch 1 on ranks 0, 2; epoch 2 on rank 1"):
        flat.agree("evaluate", "epoch 2" if flat.rank == 1 else "epoch 1")
    flat.agree("loading")


GOOD = ("flat", {})
BAD_CREATIONS = {
    "unknown name": ("flatt", {}),
    "other name": ("hierarchical", {}),
    "dummy": ("dummy", {}),
    "unknown option": ("flat", {"bogus": 1}),
    "option of another": ("flat", {"dims": "2"}),
    "wire": ("flat", {"allreduce_grad_dtype": "float16"}),
    "no wire": ("flat", {"allreduce_grad_dtype": "int8"}),
    "buckets": ("flat", {"bucket_bytes": 100}),
    "no buckets": ("flat", {"bucket_bytes": "x"}),
    "no limit": ("flat", {"timeout_s": -1}),
    "topology": ("flat", {"topology": "9x9"}),
    "unavailable": ("pure_nccl", {}),
}


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("case", BAD_CREATIONS)
def test_a_creation_that_differs_on_one_rank_raises_on_all(flat, case):
    name, options = BAD_CREATIONS[case] if flat.rank == 1 else GOOD
    caught: Exception | None = None
    try:
        create_communicator(name, **options)
    except (CommunicatorError, TypeError, ValueError) as error:
        caught = error
    texts = flat.mpi_comm.allgather(str(caught))
    assert_all_ranks(flat, caught is not None, "no error")
    assert_all_ranks(flat, len(set(texts)) == 1, f"{texts}")
    with create_communicator("flat") as comm:
        assert_all_ranks(flat, comm.allreduce(np.ones(1))[0] == comm.size)


@pytest.mark.parallel([2])
@pytest.mark.parametrize("option", [{"n_chunks": 0}, {"n_chunks": "x"}, {"dims": "5"}])
def test_a_wrong_option_of_multi_ring_on_one_rank_raises_on_all(flat, option):
    options = option if flat.rank == 1 else {}
    with pytest.raises((MismatchError, ValueError), match=r"n_chunks|dims"):
        create_communicator("multi_ring", **options)
    flat.barrier()


@pytest.mark.parallel([2])
def test_options_of_other_ranks_are_listed_for_an_unknown_one():
    with pytest.raises(TypeError, match=r"'multi_ring' has no option 'dim'.*dims, n_c"):
        create_communicator("multi_ring", dim="2")


@pytest.mark.parallel([2, 3])
def test_messages_of_any_tag_and_source_come_in_order(flat):
    last = flat.size - 1
    if flat.rank == 0:
        flat.send_obj("first", last, tag=5)
        flat.send(np.arange(4), last, tag=9)
        flat.send_obj("third", last)
    ok = True
    if flat.rank == last:
        status = MPI.Status()
        ok = flat.recv_obj(MPI.ANY_SOURCE, MPI.ANY_TAG, status) == "first"
        ok = ok and (status.Get_source(), status.Get_tag()) == (0, 5)
        ok = ok and flat.recv(0, MPI.ANY_TAG).tolist() == [0, 1, 2, 3]
        ok = ok and flat.recv_obj(0, 0) == "third"
    assert_all_ranks(flat, ok)


@pytest.mark.parallel([1, 2])
def test_a_finalized_communicator_says_so():
    comm = create_communicator("flat")
    comm.finalize()
    with pytest.raises(CommunicatorError, match="has been finalized"):
        comm.allreduce(np.ones(1))


@pytest.mark.parametrize("mpi_comm", ["world", MPI.COMM_NULL, 3])
def test_what_is_no_communicator_of_mpi4py_is_refused(mpi_comm):
    with pytest.raises(TypeError, match="intracommunicator"):
        create_communicator("flat", mpi_comm)


@pytest.mark.parallel([2])
def test_a_second_thread_in_a_collective_is_refused(flat):
    # Rank 1 keeps rank 0's first thread inside the barrier meanwhile.
    caught: list[Exception] = []
    if flat.rank == 0:
        first = threading.Thread(target=flat.barrier)
        first.start()
        time.sleep(0.3)
        try:
            flat.allreduce(np.ones(1))
        except CommunicatorError as error:
            caught.append(error)
        flat.mpi_comm.send(None, 1)
        first.join()
    else:
        flat.mpi_comm.recv(source=0)
        flat.barrier()
    ok = flat.rank == 1 or "another thread" in str(caught)
    assert_all_ranks(flat, ok, f"{caught}")


@pytest.mark.parallel([2])
def test_no_arrays_are_reduced_to_none(flat):
    assert_all_ranks(flat, flat.allreduce_arrays([]) == [])


EARLY = """
import numpy as np
from communicators import MismatchError, create_communicator
try:
    with create_communicator("flat", timeout_s=20) as comm:
        for _ in range(4 if comm.rank == 0 else 6):
            comm.allreduce(np.ones(5, "f4"))
except MismatchError:
    print("told\\n", end="", flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["raise", "pass"])
def test_a_rank_that_finalizes_too_early_does_not_hang_the_job(then):
    job = run_job(2, ["-c", EARLY.format(then=then)], timeout_s=30)
    assert job.stdout.count("told") == 2, job.output
    assert (job.returncode != 0) == (then == "raise"), job.output
