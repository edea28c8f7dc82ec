"""Print which names of ChainerMN's modules are found: each module's, as JSON.

The argument is a file of JSON: module -> names.
"""

import importlib
import json
import pathlib
import sys

import chainermn_ng

import chainermn

asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
found = {}
for module_name, names in asked.items():
    module = importlib.import_module(module_name)
    assert sys.modules[module_name] is module
    found[module_name] = {}
    for name in names:
        try:
            # As "from ... import ..." does.
            value = __import__(module_name, fromlist=[name])
            value = getattr(value, name)
        except (AttributeError, ImportError) as error:
            found[module_name][name] = f"{type(error).__name__}: {error}"
        else:
            origin = getattr(value, "__module__", None) or ""
            found[module_name][name] = origin.partition(".")[0]

assert chainermn is chainermn_ng
assert chainermn.datasets.scatter is chainermn_ng.datasets.scatter
print(json.dumps(found))
