"""Constants of the cost model from measured times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from communicators.cost_fit import CONSTANTS, FitError, Measurement, fit_constants
from communicators.cost_model import Cluster

TRUE = Cluster(
    2,
    2,
    intra_bytes_s=5e9,
    inter_bytes_s=1.17e8,
    intra_latency_s=2e-5,
    inter_latency_s=1.5e-4,
    call_s=0.0,
    is_striped=False,
)
#: From which nothing can be guessed.
START = dataclasses.replace(
    TRUE,
    intra_bytes_s=1.0,
    inter_bytes_s=1.0,
    intra_latency_s=1.0,
    inter_latency_s=1.0,
)
SIZES = (2**10, 2**14, 2**18, 2**22, 2**26)


def rows(
    true=TRUE,
    names=("flat", "hierarchical", "two_dimensional"),
    shapes=((1, 2), (2, 2)),
    sizes=SIZES,
    noise=0.0,
    seed=0,
):
    """Times that the model gives with ``true``, each off by some noise."""
    random = np.random.RandomState(seed)
    found = []
    for hosts, ranks in shapes:
        for name in names:
            for nbytes in sizes:
                row = Measurement(name, hosts, ranks, nbytes, 1.0)
                seconds = row.model_s(true) * (1 + noise * random.normal())
                found.append(dataclasses.replace(row, seconds=seconds))
    return found


def errors_of(fit, true=TRUE):
    return {
        name: getattr(fit.cluster, name) / getattr(true, name) - 1
        for name in fit.fitted
    }


@pytest.mark.parametrize("shapes", [[(2, 2)], [(1, 2), (2, 2)], [(1, 4), (4, 1)]])
def test_known_constants_come_back(shapes):
    fit = fit_constants(START, rows(shapes=shapes))
    assert fit.fitted == CONSTANTS
    assert max(map(abs, errors_of(fit).values())) < 1e-3, errors_of(fit)
    assert fit.residual < 1e-4


@pytest.mark.parametrize("true", [dataclasses.replace(TRUE, shared_memory=True), TRUE])
@pytest.mark.parametrize("seed", range(5))
def test_noise_shows_in_the_residual_and_in_the_uncertainty(true, seed):
    start = dataclasses.replace(START, shared_memory=true.shared_memory)
    fit = fit_constants(start, rows(true, noise=0.03, seed=seed))
    found = errors_of(fit, true)
    assert 0.015 < fit.residual < 0.045
    for name, error in found.items():
        assert abs(error) < 0.1, found
        assert abs(error) < 5 * fit.uncertainty[name], (found, fit.uncertainty)


def test_pieces_and_factors_of_a_row_count():
    pieces = [
        dataclasses.replace(
            row,
            name="multi_ring",
            n_pieces=4,
            dims=(row.ranks_per_host, row.hosts),
        )
        for row in rows(names=("flat",))
    ]
    timed = [dataclasses.replace(r, seconds=r.model_s(TRUE)) for r in pieces]
    assert max(map(abs, errors_of(fit_constants(START, timed)).values())) < 1e-3


def test_the_worst_row_is_named():
    measured = rows()
    measured[7] = dataclasses.replace(measured[7], seconds=measured[7].seconds * 1.5)
    fit = fit_constants(START, measured)
    assert fit.worst == measured[7]
    assert fit.worst_error < -0.2


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(1, 4)], ("intra_latency_s", "intra_bytes_s")),
        ([(4, 1)], ("inter_latency_s", "inter_bytes_s")),
    ],
)
def test_what_did_not_travel_is_not_fitted(shapes, expected):
    assert fit_constants(START, rows(shapes=shapes)).fitted == expected


def test_a_constant_that_is_given_stays():
    given = dataclasses.replace(START, intra_bytes_s=5e9)
    fit = fit_constants(given, rows(), fixed=["intra_bytes_s"])
    assert "intra_bytes_s" not in fit.fitted
    assert fit.cluster.intra_bytes_s == 5e9
    assert max(map(abs, errors_of(fit).values())) < 1e-3


@pytest.mark.parametrize(
    ("measured", "fixed", "words"),
    [
        (rows(sizes=SIZES[:1]), (), "rows of 1 size; latency and bandwidth need two"),
        (rows(shapes=[(1, 1)]), (), "nothing travelled"),
        (
            rows(shapes=[(2, 2)], names=["flat"], sizes=SIZES[:3]),
            (),
            "3 rows for 4 constants",
        ),
        (rows(shapes=[(2, 2)], names=["flat"]), (), "do not tell intra_latency_s"),
        (rows(shapes=[(4, 1)], sizes=(16, 1024)), (), "do not tell inter_bytes_s"),
        (rows(), CONSTANTS, "nothing to fit"),
        (
            [dataclasses.replace(row, seconds=0.0) for row in rows()],
            (),
            r"flat, 1024 bytes: 0\.0 seconds",
        ),
        ([], (), "nothing travelled"),
    ],
)
def test_rows_that_do_not_suffice_are_an_error(measured, fixed, words):
    with pytest.raises(FitError, match=words):
        fit_constants(START, measured, fixed)
