"""The model and a batch of the digits example."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import chainer

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "mnist"
sys.path.insert(0, str(EXAMPLES))

from train_mnist import MLP, load  # noqa: E402

__all__ = ["batch_of_digits", "digits_model", "load"]


def digits_model(n_units: int) -> chainer.Chain:
    """Return the example's classifier, uninitialised."""
    return chainer.links.Classifier(MLP(n_units, 10))


def batch_of_digits(dataset: Any, n_samples: int) -> tuple[Any, ...]:
    """Return the first samples: images (n, 64) float32 and labels (n,) int32."""
    return chainer.dataset.concat_examples([dataset[i] for i in range(n_samples)])
