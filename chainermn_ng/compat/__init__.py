"""Chainer 7.8.1 on today's Python and NumPy.

Chainer was last released for Python 3.9 and NumPy 1. :func:`prepare_chainer` makes
``import chainer`` work and repairs what NumPy 2 broke, in Chainer's own modules only:
the user's ``numpy`` and ``sys.modules`` are the same before and after.
``import chainermn_ng`` calls it; a script that imports Chainer first may call it
itself.

Known and left alone:

- ``chainer.links.caffe`` and ``chainer.exporters.caffe`` need protobuf below 4, or the
  environment variable ``PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python``; their error
  says so.
- ``import chainer`` is enough for cuDNN where CuPy has it (below 14). CuPy 14 has
  none; Chainer then uses its own kernels.
"""

from __future__ import annotations

import importlib.util
import sys
import threading

from chainermn_ng.compat.fixes import FIXES
from chainermn_ng.compat.import_hook import ChainerFinder
from chainermn_ng.compat.messages import EXPLANATIONS, INSTALL_CHAINER
from chainermn_ng.compat.numpy_names import numpy_with_distutils, numpy_with_sctypes
from chainermn_ng.compat.requirements import pkg_resources

__all__ = ["prepare_chainer"]

_STAND_INS = {
    "chainer._environment_check": {
        "numpy.distutils.system_info": numpy_with_distutils,
        "pkg_resources": pkg_resources,
    },
    "chainer.functions.array.as_strided": {"numpy": numpy_with_sctypes},
    "chainer.testing.doctest_helper": {"pkg_resources": pkg_resources},
    "chainer.testing.helper": {"pkg_resources": pkg_resources},
}
_lock = threading.Lock()
_finder = ChainerFinder(_STAND_INS, FIXES, EXPLANATIONS)


def prepare_chainer() -> None:
    """Make ``import chainer`` work from now on; import nothing of it yet.

    Calling it again does nothing. When Chainer is imported already (which old NumPy
    and setuptools allow), its loaded modules are fixed at once.

    Raises:
        ModuleNotFoundError: Chainer is not installed; the text tells how to install
            it, since ``pip install chainer`` alone fails today.
    """
    with _lock:
        if _finder in sys.meta_path:
            return
        if "chainer" not in sys.modules and importlib.util.find_spec("chainer") is None:
            raise ModuleNotFoundError(
                f"chainermn_ng needs Chainer, which is not installed here. "
                f"{INSTALL_CHAINER}",
                name="chainer",
            )
        sys.meta_path.insert(0, _finder)
        for name, fix in FIXES.items():
            if name in sys.modules:
                fix(sys.modules[name])
