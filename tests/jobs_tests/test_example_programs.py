"""Each example learns something, and is what it says it shows."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers.example_programs import (
    EXAMPLES,
    accepted_flags,
    commands_in,
    digests,
    documented_commands,
    programs,
    read_log,
    run_example,
)
from helpers.jobs import REPOSITORY

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
Image = pytest.importorskip("PIL.Image", reason="images are written with Pillow")


def assert_one_model(job, n_ranks=2):
    """Check that all ranks hold the same bits at the end."""
    assert len(digests(job)) == n_ranks, job.output
    assert len(set(digests(job))) == 1, job.output


def assert_learned(out, accuracy, key="validation/main/accuracy"):
    """Check that the loss fell and that the last accuracy is high enough."""
    log = read_log(out)
    assert log[-1]["main/loss"] < log[0]["main/loss"]
    assert log[-1][key] >= accuracy, log


@pytest.mark.parametrize("program", programs())
def test_docstring_has_the_exact_line(program):
    known = accepted_flags((EXAMPLES / program).read_text())
    commands = documented_commands(program)
    if program == "mnist/train_mnist_single.py":
        assert commands == []
        return
    assert commands
    for command in commands:
        assert command[4] == f"examples/{program}"
        assert known >= {word for word in command if word.startswith("--")}


def test_documents_have_the_same_lines():
    text = (REPOSITORY / "docs" / "source" / "examples.md").read_text()
    expected = [line for program in programs() for line in documented_commands(program)]
    assert sorted(commands_in(text)) == sorted(expected)


@pytest.mark.parametrize("program", programs())
def test_flags_are_the_same_everywhere(program):
    flags = {"--batchsize", "--epoch", "--seed", "--gpu", "--out", "--smoke"}
    if program != "mnist/train_mnist_single.py":
        flags.add("--communicator")
    assert accepted_flags((EXAMPLES / program).read_text()) >= flags


@pytest.mark.parametrize("options", [[], ["--mnbn"]], ids=["local", "mnbn"])
def test_cifar(options, tmp_path):
    job = run_example("cifar/train_cifar.py", tmp_path, options)
    assert_one_model(job)
    assert_learned(tmp_path, accuracy=0.25)  # ten classes


def test_imagenet(tmp_path):
    run_example("imagenet/train_imagenet.py", tmp_path)
    assert_learned(tmp_path, accuracy=0.5)  # four classes
    # Parameters and, since they are averaged, running statistics; 4 iterations x 3.
    models = []
    for rank in (0, 1):
        with np.load(tmp_path / f"imagenet-resnet50-smoke.{rank}.12") as arrays:
            names = [name for name in arrays.files if "/model:main/" in name]
            models.append({name: arrays[name] for name in names})
    assert len(models[0]) > 200
    assert models[0].keys() == models[1].keys()
    for name, values in models[0].items():
        np.testing.assert_array_equal(values, models[1][name], name)
    # In the last of four iterations of each epoch: nearly at twice the rate that the
    # warm-up begins with, then after one drop, then after three.
    rates = [entry["lr"] for entry in read_log(tmp_path)]
    assert rates == pytest.approx([0.035, 0.004, 0.00004])


def test_dcgan(tmp_path):
    job = run_example("dcgan/train_dcgan.py", tmp_path)
    assert_one_model(job)
    pattern = r"^steps of the generator: (\d+), discriminator: (\d+)$"
    ((n_generator, n_discriminator),) = re.findall(pattern, job.stdout, re.M)
    n_generator, n_discriminator = int(n_generator), int(n_discriminator)
    assert n_generator == read_log(tmp_path)[-1]["iteration"]
    assert 0 < n_discriminator < n_generator
    # The images to learn from are orange; before the training they come out grey.
    sheet = np.asarray(Image.open(tmp_path / "samples.png"))
    red, green, blue = sheet.reshape(-1, 3).mean(axis=0)
    assert red > green + 10 > blue + 20


def test_seq2seq(tmp_path):
    job = run_example("seq2seq/train_seq2seq.py", tmp_path)
    assert_one_model(job)
    assert_learned(tmp_path, accuracy=0.6)
    assert len(re.findall(r"^translated: \w+", job.stdout, re.M)) == 4


def test_seq2seq_model_parallel(tmp_path):
    run_example("seq2seq/seq2seq_model_parallel.py", tmp_path)
    assert_learned(tmp_path, accuracy=0.6)


def test_mnist_model_parallel(tmp_path):
    run_example("mnist/train_mnist_model_parallel.py", tmp_path)
    assert_learned(tmp_path, accuracy=0.7)


def test_mnist_dual_parallel(tmp_path):
    job = run_example("mnist/train_mnist_dual_parallel.py", tmp_path)
    assert_learned(tmp_path, accuracy=0.7)
    first_a, middle_a, first_b, middle_b = digests(job)
    assert (first_a, middle_a) == (first_b, middle_b)
    assert first_a != middle_a


def test_parallel_convolution_equals_one_process(tmp_path):
    program = "parallel_convolution/train_parallel_convolution.py"
    logs = []
    for n_ranks in (1, 2):
        out = tmp_path / str(n_ranks)
        assert_one_model(run_example(program, out, n_ranks=n_ranks), n_ranks)
        logs.append(read_log(out))
    assert_learned(tmp_path / "2", accuracy=0.6)
    for one, two in zip(*logs, strict=True):
        for key in "main/loss", "main/accuracy", "validation/main/loss":
            assert one[key] == pytest.approx(two[key], rel=1e-3), key


def test_custom_loop(tmp_path):
    job = run_example("custom_loop/train_custom_loop.py", tmp_path)
    assert_one_model(job)
    lines = re.findall(r"^epoch (\d): loss (\S+), .* accuracy (\S+)$", job.stdout, re.M)
    assert [epoch for epoch, _, _ in lines] == ["1", "2", "3"], job.output
    assert float(lines[2][1]) < float(lines[0][1])
    assert float(lines[2][2]) > 0.7
    assert (tmp_path / "model.npz").exists()
