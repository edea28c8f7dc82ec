"""Every collective, type and operator against NumPy, bit by bit."""

from __future__ import annotations

import pathlib
import re

import pytest

from nccl_emulator.library import OPERATORS, TYPES
from nccl_emulator.programs import collectives

MEMORY = pathlib.Path("/proc/meminfo")
SMALL_CHUNKS = {"NCCL_EMULATOR_CHUNK_BYTES": "1024"}


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", collectives.REDUCTIONS)
def test_reductions_equal_numpy(server, name, n_ranks):
    env = SMALL_CHUNKS
    found = server.run(collectives.every_reduction, n_ranks, name, env=env)
    n_checks = 2 * len(collectives.COUNTS) * len(TYPES) * len(OPERATORS)
    assert found == [n_checks] * n_ranks


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", collectives.MOVES)
def test_moves_equal_numpy(server, name, n_ranks):
    server.run(collectives.every_move, n_ranks, name, env=SMALL_CHUNKS)


def test_every_value_of_the_16_bit_types(server):
    server.run(collectives.every_half, 2)


def test_nan_and_infinity(server):
    server.run(collectives.not_numbers, 2)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_arrays_beyond_many_chunks_of_default_length(server, n_ranks):
    server.run(collectives.large, n_ranks, 1_234_567)


def test_a_count_beyond_32_bits(server):
    free_kib = re.search(r"MemAvailable: +(\d+)", MEMORY.read_text())
    if free_kib is None or int(free_kib[1]) < 4 * 1024**2:
        pytest.skip("needs 2 GiB of memory, and some to spare")
    server.run(collectives.beyond_32_bits, 1, timeout_s=60)


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_random_calls_with_random_delays(server, n_ranks):
    # A false alarm would be an error.
    env = SMALL_CHUNKS | {"NCCL_EMULATOR_DEADLOCK_S": "0.05"}
    server.run(collectives.random_calls, n_ranks, 200, n_ranks, env=env)
