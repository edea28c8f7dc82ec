"""What to tell a user whose Chainer cannot be imported."""

from __future__ import annotations

import sys
from importlib import metadata

INSTALL_CHAINER = """Chainer's setup.py needs a setuptools that still has pkg_resources:
    echo "setuptools<81" > build-constraint.txt
    python -m pip install --upgrade pip
    python -m pip install --build-constraint build-constraint.txt "chainer==7.8.1"
(pip below 25.3: PIP_CONSTRAINT=build-constraint.txt python -m pip install ...;
uv: uv pip install --build-constraint build-constraint.txt ...)"""

_CAFFE = """chainer.links.caffe and chainer.exporters.caffe were made for protobuf 3.
Set PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python in the environment before Python
starts, or install protobuf below 4."""


def _explain_chainer(error: Exception) -> ImportError | None:
    """Name the versions when ``import chainer`` fails for what it imports itself."""
    if not isinstance(error, ImportError | AttributeError):
        return None
    try:
        version = metadata.version("chainer")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    numpy = sys.modules.get("numpy")
    return ImportError(
        f"Chainer {version} is here but cannot be imported on Python "
        f"{sys.version.split()[0]} and NumPy {getattr(numpy, '__version__', '?')}: "
        f"{type(error).__name__}: {error}. chainermn_ng prepares Chainer 7.8.1; "
        f"reinstall that version. {INSTALL_CHAINER}",
        name="chainer",
    )


def _explain_caffe(error: Exception) -> ImportError | None:
    """Protobuf 4 and later refuse the generated module with a TypeError."""
    if not isinstance(error, TypeError):
        return None
    return ImportError(f"{_CAFFE} ({type(error).__name__}: {error})")


EXPLANATIONS = {
    "chainer": _explain_chainer,
    "chainer.links.caffe.protobuf3.caffe_pb2": _explain_caffe,
}
