"""The script for GPUs itself: steps, time limits, tables, exit status."""

from __future__ import annotations

import ast
import itertools
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from gpu_tests import run_gpu_tests, steps
from gpu_tests.find_gpu import why_no_gpu
from gpu_tests.run_gpu_tests import main
from gpu_tests.steps import Command, NotHere, Step
from gpu_tests.tables import Table

SCRIPT = pathlib.Path(run_gpu_tests.__file__)

RESULTS = """
import sys
sys.path.insert(0, {tests!r})
from gpu_tests.results import tell_detail, tell_row
tell_row("environment", "GPU", "a | made up one")
print("progress 10 %", end="")
tell_row("bandwidth", "copy", 1, 0.5, 400, 1.0)
tell_detail("400 GB/s")
"""


def step(name: str, code: str, limit_s: float = 30, **more: object) -> Step:
    """Return a step that runs a Python program."""
    return Step(
        name,
        f"what {name} does",
        limit_s,
        lambda: Command([sys.executable, "-c", code], **more),
    )


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the script over given steps, as if there were a GPU."""

    def run_script(*given: Step, args: tuple[str, ...] = ()) -> tuple[int, str, str]:
        monkeypatch.setattr(run_gpu_tests, "steps", lambda: list(given))
        monkeypatch.setattr(run_gpu_tests, "why_no_gpu", lambda: None)
        output = tmp_path / "new" / "folder" / "evidence.md"
        status = main([*args, "--output", str(output)])
        return status, capsys.readouterr().out, output.read_text()

    return run_script


@pytest.mark.parametrize("args", [[], ["--only-look-for-gpu"], ["kernels"]])
def test_without_a_gpu_it_says_so_in_a_line_whatever_is_installed(args):
    if why_no_gpu() is None:
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        # No packages, no variables of the environment.
        [sys.executable, "-I", "-S", str(SCRIPT), *args],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 77
    assert done.stdout.startswith("no GPU tests on this machine: ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("code", "count", "text"),
    [
        (0, 1, None),
        (0, 0, "finds no GPU"),
        (100, 0, "finds no GPU"),
        (804, 0, "does not start (CUDA error 804)"),
    ],
)
def test_the_driver_is_asked_for_gpus(tmp_path, code, count, text):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "driver.c"
    source.write_text(
        f"int cuInit(unsigned flags) {{ (void)flags; return {code}; }}\n"
        f"int cuDeviceGetCount(int *n) {{ *n = {count}; return 0; }}\n"
    )
    library = tmp_path / "driver.so"
    argv = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(argv, timeout=60, check=True)
    reason = why_no_gpu(str(library))
    assert reason is None if text is None else text in reason


def test_no_driver():
    assert "no NVIDIA driver" in why_no_gpu("libthat-is-nowhere.so.1")


def test_an_unknown_step_is_refused(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["kernels", "colonels"])
    assert raised.value.code == 2
    assert "unknown: colonels" in capsys.readouterr().err


def test_results_come_into_the_tables(run):
    code = RESULTS.format(tests=str(SCRIPT.parents[1]))
    status, text, markdown = run(step("good", code))
    assert status == 0
    assert "what good does                 passed" in text
    assert "400 GB/s" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "GPU a | made up one" in lines
    assert "what launches ms GB/s of the copy" in lines
    assert "copy 1 0.5 400 1.0" in lines
    assert markdown.startswith(f"## {time.strftime('%Y-', time.gmtime())}")
    assert markdown.splitlines()[0].endswith(": a | made up one")
    assert "| GPU | a \\| made up one |" in markdown
    assert "| copy | 1 | 0.5 | 400 | 1.0 |" in markdown
    assert "| what good does | passed | " in markdown
    # Tables without rows are left out.
    assert "training" not in markdown


def test_later_steps_run_after_one_that_fails_and_one_that_hangs(run):
    hanging = "import time; print('I hang', flush=True); time.sleep(60)"
    start = time.monotonic()
    status, text, markdown = run(
        step("failing", "raise SystemExit('it broke')"),
        step("hanging", hanging, limit_s=2),
        step("good", "pass"),
    )
    assert time.monotonic() - start < 20
    assert status == 1
    assert "| what failing does | FAILED | " in markdown
    assert "exit status 1, expected 0" in markdown
    assert "did not end within 2 s" in markdown
    assert "| what good does | passed | " in markdown
    # What they said is shown.
    assert "it broke" in text
    assert "I hang" in text


def test_programs_find_what_the_script_finds(run, monkeypatch, tmp_path):
    (tmp_path / "of_the_user.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, text, _ = run(step("good", "import communicators, helpers, of_the_user"))
    assert status == 0, text


def test_a_step_may_have_to_fail_with_a_text(run):
    code = "raise SystemExit('refused: too many')"
    status, _, _ = run(step("good", code, must_fail=True, texts=["refused"]))
    assert status == 0
    status, text, _ = run(step("other", code, must_fail=True, texts=["gone"]))
    assert status == 1
    assert "its output lacks 'gone'" in text
    status, text, _ = run(step("fine", "pass", must_fail=True))
    assert status == 1
    assert "exit status 0, expected another status" in text


def test_what_the_machine_lacks_is_no_failure(run):
    def lacks() -> Command:
        raise NotHere("there is no nvcc")

    status, _, markdown = run(Step("odd", "odd", 30, lacks), step("good", "pass"))
    assert status == 0
    assert "| odd | not run | 0.0 | there is no nvcc |" in markdown


def test_all_steps_together_have_a_limit(run, monkeypatch):
    monkeypatch.setattr(run_gpu_tests, "TOTAL_LIMIT_S", 2.5)
    status, _, markdown = run(
        step("slow", "import time; time.sleep(60)"), step("late", "pass")
    )
    assert status == 1
    assert "| what slow does | FAILED | " in markdown
    assert "| what late does | FAILED | 0.0 | no time was left for it |" in markdown


def test_some_steps_and_more_patience(run):
    code = "import time; time.sleep(2)"
    given = [step("one", "raise SystemExit(1)"), step("two", code, limit_s=1)]
    status, _, markdown = run(*given, args=("two", "--patience", "20"))
    assert status == 0
    assert "what one does" not in markdown


def test_the_limit_is_below_8_minutes():
    assert run_gpu_tests.TOTAL_LIMIT_S < 8 * 60


def test_programs_and_functions_of_all_steps_exist(monkeypatch):
    from nccl_emulator import build

    monkeypatch.setattr(build, "build", lambda kind: pathlib.Path("emulator") / kind)
    names = [s.name for s in steps.steps()]
    assert len(set(names)) == len(names)
    functions = {
        node.name
        for node in ast.parse(steps.ON_GPU.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    n_calls = 0
    for one in steps.steps():
        argv = list(one.command().argv)
        files = [pathlib.Path(word) for word in argv if word.endswith(".py")]
        assert all(path.is_file() for path in files), argv
        assert files or argv[1:3] == ["-m", "chainermn_ng.check"]
        if steps.ON_GPU in files:
            words = argv[argv.index("cuda") :]
            called = {b for a, b in itertools.pairwise(words) if a in BEGIN}
            assert called <= functions
            n_calls += len(called)
    assert n_calls > 10


BEGIN = ("cuda", "--")


def test_steps_that_need_nvcc_say_so(monkeypatch):
    from nccl_emulator import build

    monkeypatch.setattr(build, "find_compiler", lambda kind: None)
    by_name = {s.name: s for s in steps.steps()}
    with pytest.raises(NotHere, match="nvcc"):
        by_name["ranks-2"].command()


def test_a_table_as_text_and_as_markdown():
    table = Table("Title", ["a", "long name"], [["x", "1"], ["longer", "2"]], "A note.")
    assert table.text().splitlines() == [
        "Title",
        "a       long name",
        "------  ---------",
        "x       1",
        "longer  2",
        "A note.",
    ]
    assert table.markdown().splitlines() == [
        "**Title**",
        "",
        "| a | long name |",
        "|---|---|",
        "| x | 1 |",
        "| longer | 2 |",
        "",
        "A note.",
    ]
