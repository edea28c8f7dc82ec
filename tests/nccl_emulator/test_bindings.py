"""The real Python bindings, CuPy's and pynccl, on the emulator and NumPy memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from nccl_emulator.build import build
from nccl_emulator.ranks import TESTS


@pytest.mark.parametrize("name", ["cupy", "pynccl"])
def test_binding(name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    folder = str(build())
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "PMI"))}
    path = os.pathsep.join([str(TESTS), clean.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "LD_LIBRARY_PATH": folder, "NUMBA_NCCLLIB": folder}
    done = subprocess.run(
        [sys.executable, "-m", "nccl_emulator.programs.bindings", name, "2"],
        env=clean | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
