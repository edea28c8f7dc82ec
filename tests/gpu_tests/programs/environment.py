"""Say what is there: GPU, driver, packages. Fails where a binding does not load.

``environment.py KERNELS``: ``cuda``, or a library for the host (see helpers.gpu).
"""

from __future__ import annotations

import pathlib
import platform
import shutil
import subprocess
import sys
from importlib import metadata

import numpy as np
from helpers.gpu import load_cupy
from mpi4py import MPI

from communicators import nccl_bindings
from communicators.nccl_bindings.library import version_text
from gpu_tests.results import tell_detail, tell_row

PACKAGES = ("numpy", "chainer", "mpi4py", "pynccl", "ml_dtypes")


def driver_version() -> str:
    """Return the version of NVIDIA's kernel driver, as nvidia-smi tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown (no nvidia-smi)"
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(
        [program, *query], capture_output=True, text=True, timeout=20, check=False
    )
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown"


def cuda_text(version: int) -> str:
    """Return CUDA's number of a version, such as 13020, as people write it."""
    return f"{version // 1000}.{version % 1000 // 10}"


def package_version(name: str) -> str:
    """Return the version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def without_folder_of_packages(path: str) -> str:
    """Return a path from the folder of installed packages on, if it lies there."""
    for folder in filter(None, sys.path):
        if pathlib.Path(path).is_relative_to(folder):
            return str(pathlib.Path(path).relative_to(folder))
    return path


def main() -> None:
    """Print the rows of the table."""
    cp = load_cupy(sys.argv[1])
    nvrtc, runtime = cp.cuda.nvrtc, cp.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    memory_gb = properties["totalGlobalMem"] / 1e9
    capability = f"{properties['major']}.{properties['minor']}"
    rows = {
        "GPU": properties["name"].decode(),
        "its memory, compute capability": f"{memory_gb:.0f} GB, {capability}",
        "driver": driver_version(),
        "CUDA of the driver": cuda_text(runtime.driverGetVersion()),
        "CUDA runtime of CuPy": cuda_text(runtime.runtimeGetVersion()),
        "NVRTC": ".".join(map(str, nvrtc.getVersion())),
        "Python": platform.python_version(),
        "CuPy": cp.__version__,
        **{name: package_version(name) for name in PACKAGES},
        "MPI": " ".join(MPI.Get_library_version().splitlines()[0].strip("\0").split()),
    }
    problems = []
    for name in nccl_bindings.BINDINGS:
        reason = nccl_bindings.missing(name)
        if reason is None:
            binding = nccl_bindings.load(name)
            place = without_folder_of_packages(binding.library)
            rows[f"NCCL by {name}"] = f"{version_text(binding.version)}, {place}"
            if binding.memory != "cuda":
                reason = f"{binding.library} is not NVIDIA's"
        if reason is not None:
            problems.append(f"{name}: {reason}")
    for what, found in rows.items():
        tell_row("environment", what, found)
    halves = (cp.asarray(np.arange(4)) / 2).get()
    if not np.array_equal(halves, [0, 0.5, 1, 1.5]):
        problems.append(f"a kernel has computed {halves}")
    tell_detail("; ".join(problems) or f"{rows['GPU']}, CuPy {cp.__version__}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
