"""What is said where a binding, or NCCL, is missing or too old."""

from __future__ import annotations

import ctypes.util
import pathlib
import pickle
import textwrap

import pytest
from helpers import nccl

from communicators import NcclError, nccl_bindings
from communicators.nccl_bindings.codes import op_code, type_code
from communicators.nccl_bindings.library import version_parts, version_text

LOAD = """
    from communicators import UnavailableError, nccl_bindings
    try:
        nccl_bindings.load({name!r})
    except UnavailableError as error:
        assert nccl_bindings.missing({name!r}) == str(error)
        print(error)
    else:
        raise SystemExit("loaded")
"""


def said_when_loaded(name, library=None, before="", env=None) -> str:
    """Return the error that a binding's loading ends with, in a new process."""
    code = textwrap.dedent(before) + textwrap.dedent(LOAD.format(name=name))
    job = nccl.run_python(code, library=library, env=env)
    assert job.returncode == 0, job.output
    return job.stdout


def test_an_unknown_name_lists_the_known_ones():
    for function in (nccl_bindings.load, nccl_bindings.missing):
        with pytest.raises(ValueError, match=r"'torch' is unknown; known: cupy, pync"):
            function("torch")


def test_the_default_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("CHAINERMN_NG_NCCL_BINDING", raising=False)
    assert nccl_bindings.default_name() == "cupy"
    monkeypatch.setenv("CHAINERMN_NG_NCCL_BINDING", "pynccl")
    assert nccl_bindings.default_name() == "pynccl"
    monkeypatch.setenv("CHAINERMN_NG_NCCL_BINDING", "torch")
    with pytest.raises(ValueError, match="CHAINERMN_NG_NCCL_BINDING 'torch'"):
        nccl_bindings.default_name()


@pytest.mark.parametrize(
    ("name", "blocked", "advice"),
    [
        ("cupy", "cupy", ["[cuda13]'", "[cuda12]'"]),
        ("pynccl", "pynccl", ["[pynccl]'"]),
        ("pynccl", "numba", ["[pynccl]'"]),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(name, blocked, advice):
    if blocked == "numba":
        nccl.need_package("pynccl")
    said = said_when_loaded(name, before=f"import sys\nsys.modules[{blocked!r}] = None")
    assert f"NCCL binding {name!r}" in said
    assert blocked in said
    assert "pip install 'chainermn-ng[" in said
    assert all(text in said for text in advice), said


def test_a_missing_library_is_told_with_what_to_install(name):
    if ctypes.util.find_library("nccl") is not None:
        pytest.skip("this machine has NCCL in its system's folders")
    said = said_when_loaded(name)
    assert "libnccl.so.2" in said
    assert "pip install 'chainermn-ng[cuda13]'" in said
    assert "'chainermn-ng[cuda12]'" in said


def test_a_warning_about_a_missing_library_stays_out_of_the_way():
    nccl.need_package("cupy")
    if ctypes.util.find_library("nccl") is not None:
        pytest.skip("this machine has NCCL in its system's folders")
    # Someone else, such as Chainer, has met CuPy's warning before.
    before = """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy.cuda.nccl
    """
    assert "libnccl.so.2" in said_when_loaded("cupy", before=before)


def test_a_folder_without_a_library_is_not_passed_over(tmp_path, recorder):
    nccl.need_package("pynccl")
    said = said_when_loaded("pynccl", recorder, env={"NUMBA_NCCLLIB": str(tmp_path)})
    assert f"NUMBA_NCCLLIB={tmp_path}: no libnccl.so.2" in said


def test_a_file_that_is_no_library_is_named(name, tmp_path):
    (tmp_path / "libnccl.so.2").write_text("no library")
    said = said_when_loaded(name, tmp_path)
    assert str(tmp_path / "libnccl.so.2") in said


def test_a_library_without_functions_that_cupy_needs_is_told(tmp_path):
    nccl.need_package("cupy")
    source = pathlib.Path(__file__).with_name("recorder.c")
    nccl.compile_library(source, tmp_path, ["-DWITHOUT_SPLIT"])
    pytest.importorskip("cupy", "14")
    said = said_when_loaded("cupy", tmp_path)
    assert "needs a newer NCCL" in said
    assert "ncclCommSplit" in said


def test_the_check_command_goes_on_without_nccl(tmp_path):
    (tmp_path / "libnccl.so.2").write_text("no library")
    code = """
        from chainermn_ng import check
        check.main(["--mbytes", "1"])
    """
    job = nccl.run_python(code, library=tmp_path, timeout_s=60)
    assert job.returncode == 0, job.output
    assert "all is well" in job.stdout
    for name in nccl_bindings.BINDINGS:
        assert f"NCCL:     binding '{name}': " in job.stdout, job.output
    assert "average by pure_nccl" not in job.stdout


def test_versions_are_read_in_both_of_their_forms():
    assert version_parts(2708) == (2, 7, 8)
    assert version_parts(2803) == (2, 8, 3)
    assert version_parts(20705) == (2, 7, 5)
    assert version_parts(21003) == (2, 10, 3)
    assert version_text(22707) == "2.27.7"


def test_types_and_reductions_depend_on_the_version():
    assert type_code("bfloat16", 21003) == 9
    assert op_code("avg", 22707) == 4
    assert type_code("float64", 2803) == 8
    with pytest.raises(TypeError, match=r"2\.8\.3 has no bfloat16: it needs 2\.10"):
        type_code("bfloat16", 2803)
    with pytest.raises(ValueError, match=r"2\.9\.6 has no avg: it needs 2\.10"):
        op_code("avg", 20906)
    with pytest.raises(TypeError, match="'complex64'; it has int8, uint8"):
        type_code("complex64", 22707)
    with pytest.raises(ValueError, match="'mean'; it has sum, prod"):
        op_code("mean", 22707)


def test_an_error_of_nccl_tells_call_code_and_advice_also_when_pickled():
    error = NcclError("ncclAllReduce", 6, "remote process exited")
    for e in (error, pickle.loads(pickle.dumps(error))):
        assert (e.call, e.code, e.reason) == ("ncclAllReduce", 6, error.reason)
        assert "ncclAllReduce failed with NCCL's code 6: remote process" in str(e)
        assert "NCCL_DEBUG=WARN" in str(e)
        assert "NCCL_DEBUG=INFO" in str(e)
