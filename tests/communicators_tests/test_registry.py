"""Choosing communicators by name, and adding some."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from helpers.jobs import job_environment

from communicators import (
    UnavailableError,
    available_communicators,
    create_communicator,
    known_communicators,
    register_communicator,
)

NAMES = [
    "auto",
    "dummy",
    "flat",
    "hierarchical",
    "multi_ring",
    "naive",
    "non_cuda_aware",
    "pure_nccl",
    "single_node",
    "two_dimensional",
]


def test_all_names_are_known():
    # Others may have been added.
    assert set(NAMES) <= set(known_communicators())


@pytest.mark.reports(
    "chainer/chainermn#22", "chainer/chainermn#125", "chainer/chainercv#717"
)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "pure_nccl"])
def test_every_cpu_name_can_be_created(name):
    assert name in available_communicators()
    with create_communicator(name) as comm:
        assert comm.name == name


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="known: auto, dummy, flat") as caught:
        create_communicator("two_dimensonal")
    assert "Did you mean 'two_dimensional'?" in str(caught.value)


def test_pure_nccl_says_what_is_missing_and_what_works():
    with pytest.raises(UnavailableError, match="NCCL") as caught:
        create_communicator("pure_nccl")
    assert "multi_ring" in str(caught.value)


def test_an_option_that_a_communicator_does_not_have_is_refused():
    with pytest.raises(TypeError, match="dims"):
        create_communicator("flat", dims="1x1")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"bucket_bytes": -1}, "bucket_bytes"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"allreduce_grad_dtype": "int8"}, "allreduce_grad_dtype"),
        ({"topology": "9x9"}, "this job has 1"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        create_communicator("flat", **options)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="taken"):
        register_communicator("flat", "package.module:Class")


def test_a_target_of_another_form_is_refused():
    with pytest.raises(ValueError, match="package"):
        register_communicator("mine", "package.module.Class")


@pytest.mark.parametrize("target", [3, None])
def test_a_target_that_is_neither_class_nor_text_is_refused(target):
    with pytest.raises(TypeError, match="expected a class"):
        register_communicator("mine", target)


def run_python(code: str, **env: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=job_environment(env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_a_registered_class_is_found_by_its_name():
    out = run_python(
        """
        import numpy as np
        import communicators as c
        from communicators.flat import FlatCommunicator

        class Mine(FlatCommunicator):
            name = "mine"

        c.register_communicator("mine", Mine)
        assert "mine" in c.available_communicators()
        print(c.create_communicator("mine").allreduce(np.ones(2)).tolist())
        """
    )
    assert out.strip() == "[1.0, 1.0]"


def test_an_entry_point_adds_a_name(tmp_path):
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[chainermn_ng.communicators]\ntheirs = their_module:Theirs\n"
    )
    (tmp_path / "their_module.py").write_text(
        "from communicators.flat import FlatCommunicator\n"
        "class Theirs(FlatCommunicator):\n    name = 'theirs'\n"
    )
    out = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import communicators as c
        print("theirs" in c.known_communicators(), c.create_communicator("theirs").name)
        """
    )
    assert out.strip() == "True theirs"


def test_targets_that_cannot_be_used_are_not_available_and_say_why():
    run_python(
        """
        import communicators as c
        c.register_communicator("absent", "no_such_module:Class")
        c.register_communicator("other", dict)
        assert not {"absent", "other"} & set(c.available_communicators())
        for name, error in (("absent", c.UnavailableError), ("other", TypeError)):
            try:
                c.create_communicator(name)
            except error as caught:
                assert name in str(caught), caught
            else:
                raise AssertionError(name)
        """
    )


def test_a_class_without_a_reduction_is_refused_at_definition():
    from communicators import CommunicatorBase

    with pytest.raises(TypeError, match="all_reduce_flat"):

        class Empty(CommunicatorBase):
            pass


def test_the_engine_imports_without_chainer_mpi4py_and_cupy():
    run_python(
        """
        import sys
        for name in ("chainer", "mpi4py", "cupy"):
            sys.modules[name] = None
        import communicators
        assert communicators.Topology.parse("2x2", 4).n_hosts == 2
        assert "flat" in communicators.known_communicators()
        try:
            communicators.create_communicator("flat")
        except communicators.UnavailableError as error:
            assert "mpi4py" in str(error), error
        else:
            raise AssertionError("created a communicator without mpi4py")
        """
    )


def test_a_numpy_user_needs_no_chainer():
    out = run_python(
        """
        import sys
        sys.modules["chainer"] = None
        import numpy as np
        import communicators
        comm = communicators.create_communicator()
        print(comm.allreduce(np.arange(3)).tolist(), "chainermn_ng" in sys.modules)
        """
    )
    assert out.strip() == "[0, 1, 2] False"


def test_importing_does_not_initialise_mpi():
    out = run_python(
        """
        import sys
        import communicators
        communicators.known_communicators()
        print("mpi4py.MPI" in sys.modules)
        """
    )
    assert out.strip() == "False"
