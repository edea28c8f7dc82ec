"""Sphinx configuration; ``make docs`` builds HTML into docs/build."""

import pathlib
import re

HERE = pathlib.Path(__file__).parent
_VERSION_FILE = HERE.parents[1] / "communicators" / "_version.py"

project = "chainermn_ng"
author = "chainermn_ng contributors"
release = re.search(r'"(\d.*)"', _VERSION_FILE.read_text())[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
html_theme = "furo"
html_title = f"chainermn_ng {release}"
