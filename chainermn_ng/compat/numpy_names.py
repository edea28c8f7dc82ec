"""Views of modules that still have the names which Chainer uses and they dropped."""

from __future__ import annotations

import types
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy


class ModuleView:
    """A module with a few names of its own; the real module stays as it is.

    Args:
        module: the real one.
        names: what this view answers itself; all else comes from the module.
    """

    def __init__(self, module: ModuleType, names: Mapping[str, Any]) -> None:
        vars(self).update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __repr__(self) -> str:
        names = [name for name in vars(self) if name != "_module"]
        module = vars(self)["_module"].__name__
        return f"<{module} with {', '.join(names)} for Chainer>"


class NumpyView(ModuleView):
    """NumPy with a few names of its own.

    Chainer's modules get it in place of their global ``numpy`` or ``np``. It serves
    only modules that never ask ``xp is numpy``, since it is not that module.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        super().__init__(numpy, names)


# numpy.sctypes, as far as Chainer reads it (as_strided). NumPy kept longdouble last.
SCTYPES = {
    "int": [numpy.int8, numpy.int16, numpy.int32, numpy.int64],
    "float": [numpy.float16, numpy.float32, numpy.float64, numpy.longdouble],
}


def list_meshgrid(*args: Any, **kwargs: Any) -> list[Any]:
    """``numpy.meshgrid`` as NumPy 1 had it: a list, to which one may add a list."""
    return list(numpy.meshgrid(*args, **kwargs))


def blas_info(_name: str) -> dict[str, Any]:
    """Answer ``numpy.distutils.system_info.get_info``: nothing is known.

    Chainer asks on macOS only, to warn of the vecLib that NumPy 1.13 dropped.
    """
    return {}


numpy_with_distutils = NumpyView(
    {
        "distutils": types.SimpleNamespace(
            system_info=types.SimpleNamespace(get_info=blas_info)
        )
    }
)
numpy_with_sctypes = NumpyView({"sctypes": SCTYPES})
numpy_with_float = NumpyView({"float": float})
numpy_with_list_meshgrid = NumpyView({"meshgrid": list_meshgrid})
