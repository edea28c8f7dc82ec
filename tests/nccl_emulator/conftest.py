"""The emulator is built once, and a server of ranks starts jobs on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nccl_emulator.build import build
from nccl_emulator.ranks import RankServer


@pytest.fixture(scope="session")
def server() -> Iterator[RankServer]:
    """Starts ranks on the host build."""
    with RankServer(build("host")) as running:
        yield running
