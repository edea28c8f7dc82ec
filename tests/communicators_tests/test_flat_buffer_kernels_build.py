"""The kernels' source compiles by NVIDIA's compilers, which need no GPU."""

from __future__ import annotations

import re

import pytest
from helpers.cuda_compilers import (
    compile_by_nvcc,
    compile_by_nvrtc,
    find_nvcc,
    find_nvrtc,
    nvcc_architectures,
)

from communicators.devices.flat_buffer_kernels import (
    KERNEL_NAMES,
    THREADS,
    source,
)

# Volta, or what this nvcc has as its oldest; the two that clusters have most.
ARCHITECTURES = ["oldest", 80, 90]
OLDEST = 70
# 16 bytes in PTX.
VECTORS = r"(v4\.[bfu]32|v2\.[bfu]64)"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles_without_warnings_and_spills(architecture, tmp_path):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc here")
    known = nvcc_architectures(nvcc)
    if architecture == "oldest":
        architecture = min(a for a in known if a >= OLDEST)
    elif architecture not in known:
        pytest.skip(f"this nvcc does not compile for sm_{architecture}")
    reports = compile_by_nvcc(nvcc, source(), architecture, tmp_path)
    print(*reports, sep="\n")
    assert sorted(report.name for report in reports) == sorted(KERNEL_NAMES)
    assert all(r.stack_bytes == r.spill_bytes == 0 for r in reports), reports
    # Four blocks and more on a multiprocessor of 65536 registers.
    assert max(r.n_registers for r in reports) <= 65536 // (4 * THREADS)


@pytest.fixture(scope="module")
def ptx():
    """What CuPy makes of the source: these are its options."""
    nvrtc = find_nvrtc()
    if nvrtc is None:
        pytest.skip("no NVRTC here (pip install nvidia-cuda-nvrtc)")
    options = ["-arch=compute_80", "-ftz=true", "--device-as-default-execution-space"]
    return compile_by_nvrtc(nvrtc, source(), options)


def test_nvrtc_finds_the_kernels_by_their_names(ptx):
    assert sorted(re.findall(r"\.entry (\w+)\(", ptx)) == sorted(KERNEL_NAMES)


def test_subnormal_numbers_are_kept_whatever_cupy_asks_for(ptx):
    arithmetic = re.findall(r"^\s*((?:mul|cvt|add|fma|sub)\.\S*f\d+\S*)", ptx, re.M)
    assert "mul.rn.f32" in arithmetic
    assert not [name for name in arithmetic if "ftz" in name]


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_aligned_tiles_are_moved_by_16_bytes(ptx, name):
    [body] = re.findall(rf"\.entry {name}\(.*?\n}}\n", ptx, re.DOTALL)
    # A block has not enough threads for tiles of bytes to be moved by more than 8.
    width = r"(v4\.[bfu]16|v2\.[bfu]32)" if "raw1" in name else VECTORS
    for access in ("ld", "st"):
        assert re.search(rf"\b{access}\.(global\.)?{width}\b", body), access
