"""Arguments and results between the engine and NCCL's C functions.

A library that remembers its arguments stands in for NCCL: what is looked at here cannot
be seen from the results of communication.
"""

from __future__ import annotations

import textwrap

import pytest
from helpers import nccl

from communicators.nccl_bindings.cupy import signed_chars

nccl.need_any_package()

START = """
    import ctypes
    from communicators import NcclError, nccl_bindings

    binding = nccl_bindings.load({name!r})
    assert nccl_bindings.load({name!r}) is binding
    library = ctypes.CDLL(binding.library)

    def recorded():
        return list((ctypes.c_int64 * 7).in_dll(library, "recorded"))

    def error_of(function, *args):
        try:
            function(*args)
        except NcclError as error:
            return error
        raise SystemExit("no error")
"""


def run(name, recorder, code, **options):
    program = textwrap.dedent(START.format(name=name)) + textwrap.dedent(code)
    job = nccl.run_python(program, library=recorder, **options)
    assert job.returncode == 0, job.output
    return job


@pytest.mark.reports("cupy/cupy#8562")
def test_all_arguments_reach_their_places_and_counts_have_64_bits(name, recorder):
    run(
        name,
        recorder,
        """
        comm = binding.init_rank(9, bytes(128), 8)
        a, b, n, stream = 2**47 + 1, 2**46 + 3, 2**33 + 7, 2**45 + 5
        calls = {
            "all_reduce": ((a, b, n, "int8", "avg"), [a, b, n, 0, 4, -1]),
            "reduce": ((a, b, n, "bfloat16", "prod", 6), [a, b, n, 9, 1, 6]),
            "broadcast": ((a, b, n, "float64", 7), [a, b, n, 8, -1, 7]),
            "reduce_scatter": ((a, b, n, "float16", "max"), [a, b, n, 6, 2, -1]),
            "all_gather": ((a, b, n, "uint64"), [a, b, n, 5, -1, -1]),
            "send": ((a, n, "int64", 3), [a, -1, n, 4, -1, 3]),
            "recv": ((b, n, "uint8", 2), [-1, b, n, 1, -1, 2]),
        }
        for method, (args, expected) in calls.items():
            getattr(comm, method)(*args, stream)
            assert recorded() == [*expected, stream], (method, recorded())
            call = ctypes.c_char_p.in_dll(library, "recorded_call").value.decode()
            assert call.lower() == "nccl" + method.replace("_", ""), (method, call)
        """,
    )


def test_ids_keep_all_their_bytes(name, recorder):
    run(
        name,
        recorder,
        """
        unique_id = binding.create_unique_id()
        assert unique_id == bytes(2 * i % 256 for i in range(128)), unique_id
        for given in (unique_id, bytes(range(128, 256)), bytes(128)):
            binding.init_rank(2, given, 1)
            got = (ctypes.c_ubyte * 128).in_dll(library, "recorded_id")
            assert bytes(got) == given, bytes(got)
        """,
    )


def test_ids_are_signed_chars_for_older_versions_of_cupy():
    every_byte = bytes(range(256))
    chars = signed_chars(every_byte)
    assert (min(chars), max(chars)) == (-128, 127)
    assert bytes(char & 0xFF for char in chars) == every_byte


def test_every_code_becomes_an_error_with_what_the_library_says(name, recorder):
    run(
        name,
        recorder,
        """
        comm = binding.init_rank(4, bytes(128), 2)
        async_error = ctypes.c_int.in_dll(library, "async_error")
        for code in range(1, 10):
            error = error_of(comm.all_reduce, 1, 2, 3, "int8", "sum", code)
            assert (error.call, error.code) == ("ncclAllReduce", code), error
            for text in ("words of the library", "its last message", "rank 2 of 4",
                         "NCCL_DEBUG", "2.27.7", binding.library):
                assert text in str(error), error
            assert ("NCCL_COMM_BLOCKING=0" in str(error)) == (code == 7)
            async_error.value = code
            if code == 7:
                comm.check_async_error()
                continue
            error = error_of(comm.check_async_error)
            assert (error.call, error.code) == ("ncclCommGetAsyncError", code), error
        async_error.value = 0
        comm.check_async_error()
        """,
    )


def test_wrong_arguments_never_reach_the_library(name, recorder):
    run(
        name,
        recorder,
        """
        comm = binding.init_rank(4, bytes(128), 2)
        comm.all_reduce(1, 2, 3, "int8", "sum", 400)
        before = recorded()
        for error, args in (
            (ValueError, (1, 2, -1, "int8", "sum", 0)),
            (ValueError, (1, 2, 2**63, "int8", "sum", 0)),
            (TypeError, (1, 2, 1.5, "int8", "sum", 0)),
            (TypeError, (1, 2, 3, "complex64", "sum", 0)),
            (ValueError, (1, 2, 3, "int8", "mean", 0)),
        ):
            try:
                comm.all_reduce(*args)
            except error:
                continue
            raise SystemExit(f"{args} was accepted")
        for size, unique_id, rank in ((2, bytes(127), 0), (2, bytes(128), 2),
                                      (0, bytes(128), 0), (2, bytes(128), -1)):
            try:
                binding.init_rank(size, unique_id, rank)
            except ValueError:
                continue
            raise SystemExit(f"{size, rank} was accepted")
        assert recorded() == before
        """,
    )


def test_an_ended_communicator_refuses_calls_and_ends_once(name, recorder):
    run(
        name,
        recorder,
        """
        for first, second, how in (("abort", "destroy", "aborted"),
                                   ("destroy", "abort", "destroyed")):
            comm = binding.init_rank(4, bytes(128), 2)
            for _ in range(2):
                getattr(comm, first)()
                getattr(comm, second)()
            for call in (lambda: comm.all_reduce(1, 2, 3, "int8", "sum", 0),
                         comm.check_async_error):
                error = error_of(call)
                assert f"the communicator has been {how}" in str(error), error
        """,
    )


def test_split_hands_color_and_key_over(recorder):
    nccl.need_package("cupy")
    run(
        "cupy",
        recorder,
        """
        comm = binding.init_rank(9, bytes(128), 8)
        if not binding.has_split:
            try:
                comm.split(0, 0)
            except NotImplementedError:
                raise SystemExit(0)
        seen = (ctypes.c_int64 * 2).in_dll(library, "recorded_split")
        part = comm.split(4, 7)
        assert list(seen) == [4, 7]
        assert (part.rank, part.size) == (3, 5)
        assert comm.split(None, 6) is None
        assert list(seen) == [-1, 6]
        try:
            comm.split(-1, 0)
        except ValueError:
            raise SystemExit(0)
        raise SystemExit("a negative color was accepted")
        """,
    )


def test_pynccl_says_that_it_cannot_split(recorder):
    nccl.need_package("pynccl")
    run(
        "pynccl",
        recorder,
        """
        assert binding.has_split is False
        try:
            binding.init_rank(1, bytes(128), 0).split(0, 0)
        except NotImplementedError as error:
            assert "pynccl" in str(error)
        else:
            raise SystemExit("split")
        """,
    )


def test_pynccl_goes_on_taking_what_it_took(recorder):
    nccl.need_package("pynccl")
    run(
        "pynccl",
        recorder,
        """
        import os
        import pynccl.binding
        assert os.environ["NUMBA_NCCLLIB"] == ""
        api = pynccl.binding.cuNccl()._api
        api.ncclAllReduce(1, 2, ctypes.c_int(5), 7, 0, None, None)
        assert recorded()[2] == 5
        """,
    )


def test_both_bindings_use_the_library_that_is_loaded(recorder):
    """pynccl is not told of a folder: it takes what CuPy has loaded."""
    nccl.need_package("cupy")
    nccl.need_package("pynccl")
    run(
        "cupy",
        recorder,
        """
        import os
        del os.environ["LD_LIBRARY_PATH"]
        other = nccl_bindings.load("pynccl")
        assert other.library == binding.library
        assert binding.memory == other.memory == "cuda"
        assert str(other) == f"binding 'pynccl' with NCCL 2.27.7 ({other.library})"
        """,
    )
