"""``import chainer`` works, and leaves NumPy and sys.modules as they were."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import numpy as np
import pytest
from helpers.jobs import run_command

PREPARE = "from chainermn_ng import compat\ncompat.prepare_chainer()\n"


def python(code, *options, env=None):
    """Run code in a fresh interpreter where every warning is an error."""
    return run_command([sys.executable, "-W", "error", *options, "-c", code], env=env)


def assert_runs(code, *options, env=None):
    result = python(code, *options, env=env)
    assert result.returncode == 0, result.output
    assert result.stderr == "", result.output
    return result.stdout


@pytest.mark.reports(
    "cupy/cupy#8515",
    "pyscf/gpu4pyscf#683",
    "yt-project/unyt#492",
    "firedrakeproject/firedrake#3718",
    "radiocosmology/caput#23",
)
def test_chainer_can_be_imported_without_a_warning():
    assert_runs(PREPARE + "import chainer\nassert chainer.__version__ == '7.8.1'")


def test_import_of_the_package_is_enough():
    assert_runs("import chainermn_ng, chainer, chainer.testing")


def test_preparing_twice_does_nothing():
    assert_runs(
        PREPARE
        + """
import sys
def finders():
    return [type(f).__name__ for f in sys.meta_path].count('ChainerFinder')
compat.prepare_chainer()
assert finders() == 1
import chainer
add = chainer.reporter.Summary.add
compat.prepare_chainer()
assert finders() == 1 and chainer.reporter.Summary.add is add
"""
    )


def test_preparing_imports_nothing_of_chainer():
    assert_runs(
        "import sys, importlib.util\n"
        "from importlib import import_module\n"
        "import types\n"
        "spec = importlib.util.find_spec('chainermn_ng')\n"
        # The package itself imports Chainer; its parts must not.
        "package = types.ModuleType('chainermn_ng')\n"
        "package.__path__ = spec.submodule_search_locations\n"
        "sys.modules['chainermn_ng'] = package\n"
        "import_module('chainermn_ng.compat').prepare_chainer()\n"
        "assert 'chainer' not in sys.modules"
    )


def test_numpy_and_modules_are_as_before():
    assert_runs(
        """
import sys
import numpy
before = dict(vars(numpy))
"""
        + PREPARE
        + """
import chainer, chainer.testing, chainer.testing.doctest_helper
from chainer import functions
functions.resize_images(numpy.zeros((1, 1, 2, 2), 'f'), (3, 3))
after = vars(numpy)
# NumPy loads some of its own parts on demand; nothing that was there has changed.
assert all(after[name] is value for name, value in before.items())
if numpy.lib.NumpyVersion(numpy.__version__) >= '2.0.0':
    assert not {'sctypes', 'float'} & after.keys()
assert not [name for name in sys.modules
            if name == 'pkg_resources' or name.startswith('numpy.distutils')]
assert chainer.functions.array.as_strided is not None
"""
    )


def test_setuptools_is_not_needed():
    assert_runs(
        """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('setuptools', 'pkg_resources', 'distutils'):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
for name in [n for n in sys.modules if n.partition('.')[0] == 'setuptools']:
    del sys.modules[name]
"""
        + PREPARE
        + "import chainer, chainer.testing"
    )


def test_real_pkg_resources_stays_what_it_is():
    assert_runs(
        """
import sys, types
real = sys.modules['pkg_resources'] = types.ModuleType('pkg_resources')
"""
        + PREPARE
        + """
import chainer.testing
assert sys.modules['pkg_resources'] is real and not vars(real).get('require')
import pkg_resources
assert pkg_resources is real
"""
    )


def test_chainer_imported_before_by_other_means_is_fixed():
    # Users have shims of their own, and NumPy 1.26 with old setuptools needs none.
    assert_runs(
        """
import sys, types
import numpy
shim = types.ModuleType('pkg_resources')
class Error(Exception): pass
def require(*args): raise Error
shim.DistributionNotFound = shim.VersionConflict = shim.ResolutionError = Error
shim.require = require
sys.modules['pkg_resources'] = shim
for name in ('numpy.distutils', 'numpy.distutils.system_info'):
    sys.modules[name] = types.ModuleType(name)
numpy.distutils = sys.modules['numpy.distutils']
had = 'sctypes' in vars(numpy)
if not had:
    numpy.sctypes = {'int': [numpy.int32, numpy.int64], 'float': [numpy.float32]}
import chainer
if not had:
    del numpy.sctypes
"""
        + PREPARE
        + """
import chainer.functions as F
x = [numpy.ones(2, 'u1'), numpy.ones(1, 'u1')]
assert F.pad_sequence(x, padding=-1).array[1, 1] == 255
F.resize_images(numpy.zeros((1, 1, 2, 2), 'f'), (3, 3))
assert F.fix(numpy.array([-1.5], 'f')).array[0] == -1
v = chainer.Variable(numpy.array([3.0]))
assert (v / numpy.float32(3)).array[0] == 1
"""
    )


def test_import_in_a_thread():
    assert_runs(
        "import threading\n"
        + PREPARE
        + "import importlib\nfound = []\n"
        + "def work(): found.append(importlib.import_module('chainer'))\n"
        + "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        + "[t.start() for t in threads]; [t.join() for t in threads]\n"
        + "assert len(found) == 4 and found[0].Variable"
    )


def test_absent_chainer_tells_how_to_install_it(tmp_path):
    # A site-packages that holds only what compat itself needs.
    here = pathlib.Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs", "packaging"):
        if (here / name).exists():
            (tmp_path / name).symlink_to(here / name)
    code = f"""
import sys
sys.path = [p for p in sys.path if 'site-packages' not in p] + [{str(tmp_path)!r}]
try:
    import chainermn_ng
except ModuleNotFoundError as error:
    print(error)
"""
    result = run_command([sys.executable, "-c", code])
    assert "Chainer, which is not installed here" in result.stdout, result.output
    assert "--build-constraint" in result.stdout
    assert "setuptools<81" in result.stdout


def test_broken_chainer_names_versions_and_cure(tmp_path):
    (tmp_path / "chainer").mkdir()
    (tmp_path / "chainer" / "__init__.py").write_text("import no_such_module\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + (
        "try:\n    import chainermn_ng, chainer\n"
        "except ImportError as error:\n    print(error)\n"
    )
    result = run_command([sys.executable, "-c", code])
    assert "cannot be imported on Python" in result.stdout, result.output
    assert "No module named 'no_such_module'" in result.stdout
    assert "--build-constraint" in result.stdout


def test_tools_still_find_sources_of_fixed_modules():
    assert_runs(
        PREPARE
        + """
import importlib.resources, inspect, pickle
import chainer.functions.array.as_strided as m
import chainer.functions.array.pad_sequence as p
assert 'def as_strided' in inspect.getsource(m)
assert 'class PadSequence' in inspect.getsource(p.PadSequence)
assert importlib.resources.files('chainer').joinpath('__init__.py').is_file()
import chainer
assert pickle.loads(pickle.dumps(chainer.links.Linear(2, 2))).W.shape == (2, 2)
"""
    )


def test_caffe_tells_what_it_needs():
    code = PREPARE + "import chainer\nfrom chainer.links import caffe\n"
    result = run_command([sys.executable, "-c", code])
    if result.returncode:
        assert "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python" in result.stderr
    python_protobuf = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    result = run_command([sys.executable, "-c", code], env=python_protobuf)
    assert result.returncode == 0, result.output


@pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None,
    reason="a second CuPy beside the real one is worth a warning",
)
def test_version_of_cupy_gives_no_warning(tmp_path):
    # A CuPy built from source is called just "cupy", and Chainer knows that name.
    info = tmp_path / "cupy-14.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cupy\nVersion: 14.2.0\n"
    )
    assert_runs(
        f"import sys; sys.path.append({str(tmp_path)!r})\n" + PREPARE + "import chainer"
    )


def test_requirements_of_tests_compare_versions():
    # In an interpreter of its own: chainer.testing declares marks that pytest refuses.
    assert_runs(
        PREPARE
        + """
import unittest
from chainer import testing
from chainer.testing import doctest_helper

def runs(decorator):
    ran = []
    class Case(unittest.TestCase):
        @decorator
        def test(self):
            ran.append(True)
    Case('test').run()
    return bool(ran)

assert runs(testing.with_requires('numpy>=1.9'))
assert not runs(testing.with_requires('numpy<1.10'))
assert not runs(testing.with_requires('numpy>=1.9', 'no-such-package-here'))
assert runs(testing.without_requires('numpy>=100'))
assert not runs(testing.without_requires('numpy'))
assert doctest_helper.skipif_requires_satisfied('numpy>=1.10')
assert not doctest_helper.skipif_requires_satisfied('numpy>=1.10,<1.11')
"""
    )


def test_multiprocess_iterator():
    code = (
        PREPARE
        + """
import warnings
import numpy, chainer
# Python's own, on forking while threads run (Chainer's design).
warnings.filterwarnings('ignore', '.*fork', DeprecationWarning)
data = numpy.arange(20, dtype='f')
it = chainer.iterators.MultiprocessIterator(data, 5, shuffle=False, n_processes=2)
assert [float(sum(next(it))) for _ in range(4)] == [10, 35, 60, 85]
it.finalize()
"""
    )
    assert_runs(code)
