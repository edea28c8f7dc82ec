"""A device for each rank, or an error on all of them."""

from __future__ import annotations

import pytest
from helpers.errors import assert_all_raise
from helpers.ranks import assert_all_ranks

from chainermn_ng import choose_device, devices
from communicators import MismatchError, UnavailableError


@pytest.mark.parallel([1, 2, 3])
def test_the_cpu_is_there(comm):
    for given in (comm, comm.engine, comm.mpi_comm):
        device = choose_device(given, gpu=False)
        assert_all_ranks(comm, device.name == "@numpy", device.name)


@pytest.mark.parallel([1, 2, 3])
def test_without_a_gpu_all_ranks_are_told_why(comm):
    if devices.why_no_gpu(comm.world_intra_rank) is None:
        pytest.skip("this machine has a GPU for each rank")
    ranks = ", ".join(map(str, range(comm.size)))
    assert_all_raise(
        comm, lambda: choose_device(comm), UnavailableError, f"{ranks}: ", "no GPU"
    )


@pytest.mark.parallel([2, 3])
def test_one_rank_without_a_gpu_is_an_error_on_all(comm, monkeypatch):
    is_last = comm.rank == comm.size - 1
    reason = "there are 1; start no more" if is_last else None
    monkeypatch.setattr(devices, "why_no_gpu", lambda number: reason)
    text = f"rank {comm.size - 1}: UnavailableError: there are 1"
    assert_all_raise(comm, lambda: choose_device(comm), UnavailableError, text)


@pytest.mark.parallel(2)
def test_ranks_that_want_different_kinds_are_told_so(comm, monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda number: None)
    gpu = comm.rank == 0
    assert_all_raise(comm, lambda: choose_device(comm, gpu), MismatchError, "gpu=")
