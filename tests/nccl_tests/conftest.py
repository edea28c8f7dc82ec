"""Fixtures: each binding in this process, and libraries for other processes."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from helpers import nccl
from mpi4py import MPI

from communicators import nccl_bindings
from communicators.nccl_bindings import NcclBinding, NcclCommunicator

HERE = pathlib.Path(__file__).parent


@pytest.fixture(params=nccl_bindings.BINDINGS)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a binding whose package is installed."""
    nccl.need_package(request.param)
    return request.param


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of a library that remembers what it was called with."""
    return nccl.compile_library(
        HERE / "recorder.c", tmp_path_factory.mktemp("recorder")
    )


@pytest.fixture(scope="session")
def emulator() -> pathlib.Path:
    """Folder of the emulated NCCL on host memory, for other processes."""
    return nccl.build_emulator()


@pytest.fixture
def binding(name: str) -> NcclBinding:
    """Each binding in this process, over the emulated NCCL."""
    return nccl.load_emulated(name)


@pytest.fixture
def comm(binding: NcclBinding) -> Iterator[NcclCommunicator]:
    """A communicator over all ranks of the job, by each binding."""
    mpi_comm = MPI.COMM_WORLD
    unique_id = mpi_comm.bcast(binding.create_unique_id())
    communicator = binding.init_rank(mpi_comm.size, unique_id, mpi_comm.rank)
    yield communicator
    communicator.destroy()
