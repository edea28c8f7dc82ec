"""What the tests of several ranks rely on."""

import pytest
from mpi4py import MPI


@pytest.mark.parallel(4)
def test_each_rank_has_temporary_folders_of_its_own(tmp_path_factory):
    roots = MPI.COMM_WORLD.allgather(str(tmp_path_factory.getbasetemp().parent))
    assert len(set(roots)) == len(roots)
