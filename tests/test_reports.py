"""Each public report that the documents refer to has a test that guards against it."""

import ast
import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
DIFFERENCES = REPOSITORY / "docs" / "source" / "differences.md"

_NUMBER = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def guarded():
    """Return public number -> the tests that are marked with it."""
    found = {}
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for number in numbers_of_marks(node):
                    found.setdefault(number, []).append(f"{path.name}::{node.name}")
    return found


def numbers_of_marks(function):
    """Return the arguments of ``pytest.mark.reports``, of a test or of its cases."""
    calls = [
        node
        for decorator in function.decorator_list
        for node in ast.walk(decorator)
        if isinstance(node, ast.Call)
    ]
    return [
        argument.value
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.reports"
        for argument in call.args
    ]


def test_every_report_in_the_table_of_differences_has_a_test():
    named = set(_NUMBER.findall(DIFFERENCES.read_text()))
    assert named, f"no report is named in {DIFFERENCES.name}"
    missing = sorted(named - set(guarded()))
    assert not missing, f"no test is marked with {missing}"


def test_every_marked_report_stands_in_the_table_of_differences():
    marks = guarded()
    wrong = [number for number in marks if not _NUMBER.fullmatch(number)]
    assert not wrong, f"not owner/repository#number: {wrong}"
    unnamed = set(marks) - set(_NUMBER.findall(DIFFERENCES.read_text()))
    assert not unnamed, {number: marks[number] for number in sorted(unnamed)}
