import copy
import pickle

import chainer
import numpy as np
import pytest
from helpers.errors import assert_all_raise, raised_by
from helpers.ranks import assert_all_ranks
from mpi4py import MPI

import communicators
from chainermn_ng.communicators import (
    ChainerCommunicator,
    CommunicatorBase,
    create_communicator,
    engine_of,
)


@pytest.mark.parallel([1, 2, 3])
def test_array_collectives_reach_the_engine(comm):
    rank, size = comm.rank, comm.size
    mine = np.full((2,), rank, "f")
    total = size * (size - 1) / 2
    ok = (
        (comm.allreduce(mine) == total).all()
        and (comm.allreduce(mine, op="max") == size - 1).all()
        and (comm.bcast(mine, root=size - 1) == size - 1).all()
        and [a[0] for a in comm.allgather(mine)] == list(range(size))
        and [a[0] for a in comm.alltoall([mine] * size)] == list(range(size))
        and (comm.scatter([mine] * size, root=0) == 0).all()
        and (comm.reduce_scatter(np.ones((size, 3))) == size).all()
    )
    gathered = comm.gather(mine, root=0)
    ok = ok and (len(gathered) == size if rank == 0 else gathered is None)
    comm.barrier()
    assert_all_ranks(comm, bool(ok))


@pytest.mark.parallel([1, 2, 3])
def test_object_collectives_reach_the_engine(comm):
    rank, size = comm.rank, comm.size
    everyone = list(range(size))
    ok = (
        comm.bcast_obj({"from": rank}, root=size - 1) == {"from": size - 1}
        and comm.allgather_obj(rank) == everyone
        and comm.alltoall_obj([rank] * size) == everyone
        and comm.scatter_obj(everyone if rank == 0 else None) == rank
        and comm.allreduce_obj(rank + 1, op="max") == size
        and comm.gather_obj(None) == ([None] * size if rank == 0 else None)
    )
    assert_all_ranks(comm, ok)


@pytest.mark.parallel(2)
def test_send_and_recv_have_a_default_tag(comm):
    if comm.rank == 0:
        comm.send(np.arange(3), dest=1)
        comm.send_obj("text", dest=1)
        ok = True
    else:
        ok = (comm.recv(source=0) == np.arange(3)).all() and comm.recv_obj(0) == "text"
    assert_all_ranks(comm, bool(ok))


@pytest.mark.parallel([1, 2, 3])
def test_ranks_and_hosts_are_the_engines(comm):
    engine = comm.engine
    for name in [
        "name",
        "rank",
        "size",
        "intra_rank",
        "intra_size",
        "inter_rank",
        "inter_size",
        "topology",
        "mpi_comm",
        "timeout_s",
        "world_intra_rank",
    ]:
        assert getattr(comm, name) == getattr(engine, name), name
    assert set(comm.sent_bytes) == set(engine.sent_bytes)
    assert isinstance(comm, CommunicatorBase)


@pytest.mark.parallel([2, 3, 4])
def test_split_inherits_settings_and_gives_none_without_a_colour():
    with create_communicator("flat", allreduce_grad_dtype="float16") as comm:
        group = comm.split(comm.rank % 2, comm.rank)
        ok = (
            isinstance(group, ChainerCommunicator)
            and group.size == len(range(comm.rank % 2, comm.size, 2))
            and group.get_config("allreduce_grad_dtype") == np.float16
        )
        assert_all_ranks(comm, ok)
        group.finalize()
        for undefined in (None, MPI.UNDEFINED):
            color = undefined if comm.rank == 0 else 1
            group = comm.split(color, 0)
            assert_all_ranks(comm, (group is None) == (comm.rank == 0))
            if group is not None:
                assert group.allreduce_obj(1) == comm.size - 1
                group.finalize()


@pytest.mark.parallel([1, 2])
def test_settings_change_what_travels_and_unknown_ones_are_refused(comm):
    with pytest.raises(ValueError, match="allreduce_grad_dtype, batched_copy"):
        comm.set_config("no_such_setting")
    with pytest.raises(ValueError, match="no_such_setting"):
        comm.get_config("no_such_setting")
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(np.zeros(1, "f"))
    fine = np.array([1 + 2**-20], "f")
    for dtype, expected in ((None, fine), ("float16", [1]), (None, fine)):
        comm.set_config("allreduce_grad_dtype", dtype)
        model.w.grad = fine.copy()
        comm.multi_node_mean_grad(model)
        assert_all_ranks(comm, (model.w.grad == expected).all(), f"{model.w.grad!r}")
    with comm.config_scope():
        comm.allreduce_grad_dtype = np.float32
        with pytest.raises(ValueError, match="colour"):
            comm.colour = "red"
    assert comm.get_config() == {
        "allreduce_grad_dtype": np.dtype("f"),
        "batched_copy": True,
    }


@pytest.mark.parallel(1)
def test_batched_copy_warns_that_it_changes_nothing(comm):
    with pytest.warns(DeprecationWarning, match="batched_copy"):
        comm.set_config("batched_copy", False)
    with pytest.warns(DeprecationWarning, match="batched_copy"):
        create_communicator("naive", batched_copy=True).finalize()


@pytest.mark.parallel([1, 2])
def test_copies_are_the_same_communicator(comm):
    assert copy.copy(comm) is comm
    assert copy.deepcopy({"comm": comm})["comm"] is comm
    assert pickle.loads(pickle.dumps(comm)) is comm


@pytest.mark.parallel(1)
def test_a_pickled_communicator_is_of_no_use_elsewhere(comm):
    function, (_, key, name) = comm.__reduce__()
    with pytest.raises(TypeError, match="create a communicator there"):
        function("another process", key, name)


@pytest.mark.parallel([1, 2])
def test_unknown_name_lists_the_known_ones(comm):
    assert_all_raise(
        comm, lambda: create_communicator("flatt"), ValueError, "flatt", "hierarchical"
    )


@pytest.mark.parallel([1, 2])
def test_engine_of_takes_all_kinds_of_communicators(comm):
    for given in (comm, comm.engine, MPI.COMM_WORLD):
        with engine_of(given) as engine:
            assert isinstance(engine, communicators.CommunicatorBase)
            assert engine.allreduce_obj(1) == comm.size

    def enter():
        with engine_of("comm"):
            pass

    assert isinstance(raised_by(enter), TypeError)


@pytest.mark.parallel([2])
def test_recv_obj_takes_what_chainermn_takes(comm):
    if comm.rank == 0:
        for tag in (5, 6, 7):
            comm.send_obj(tag, 1, tag=tag)
    ok = True
    if comm.rank == 1:
        status = MPI.Status()
        got = [comm.recv_obj(0), comm.recv_obj(0, status), comm.recv_obj(0, tag=7)]
        ok = got == [5, 6, 7] and status.Get_tag() == 6
    assert_all_ranks(comm, ok)


@pytest.mark.parallel([1])
def test_methods_that_pass_on_calls_show_the_whole_contract(comm):
    assert "Raises" in type(comm).send.__doc__
    assert "float32" in type(comm).allreduce.__doc__


@pytest.mark.parallel([1])
def test_what_is_no_model_is_refused(comm):
    for method in (comm.bcast_data, comm.multi_node_mean_grad):
        with pytest.raises(TypeError, match=r"chainer\.Link; got NoneType"):
            method(None)
