"""Fixtures: each binding in this process, and libraries for other processes."""

from __future__ import annotations

import pathlib

import pytest
from helpers import nccl

from communicators import nccl_bindings

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
