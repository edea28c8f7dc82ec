"""Fixtures: two virtual hosts for the tests of one file; skipped where none can be."""

from collections.abc import Iterator

import pytest
from helpers.hosts import VirtualHosts, virtual_hosts, why_no_hosts

_WHY_NOT = why_no_hosts()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _WHY_NOT is None:
        return
    for item in items:
        if item.path.is_relative_to(__file__.removesuffix("conftest.py")):
            item.add_marker(pytest.mark.skip(reason=_WHY_NOT))


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[VirtualHosts]:
    """Two hosts on cables without a speed limit."""
    with virtual_hosts(2) as hosts:
        yield hosts
