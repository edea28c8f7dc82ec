import pytest

from chainermn_ng.communicators import create_communicator


@pytest.fixture
def comm():
    comm = create_communicator("flat", timeout_s=30)
    yield comm
    comm.finalize()
