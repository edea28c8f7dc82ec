"""The constants of the cost model from measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from communicators.cost_model import Cluster, allreduce_s

#: What can be fitted. The cost of a call is part of the latencies then: rows of one
#: shape of cluster cannot tell them apart.
CONSTANTS = (
    "intra_latency_s",
    "intra_bytes_s",
    "inter_latency_s",
    "inter_bytes_s",
)
#: A constant is told apart if the others cannot stand in for a change of it: the part
#: of its effect on the times that is its own, in relative units (root mean square).
_LEAST_EFFECT = 0.01
_ROUNDS = 200
#: Sum of squares of relative errors that nothing measured has.
_EXACT = 1e-12


class FitError(ValueError):
    """The rows do not suffice, or are none."""


@dataclass(frozen=True)
class Measurement:
    """One measured all-reduce.

    Attributes:
        name: of the communicator.
        hosts: their number.
        ranks_per_host: equal on all hosts.
        nbytes: of the message.
        seconds: the median over repetitions, the slowest rank's.
        n_pieces: buckets or chunks in which it travelled.
        dims: of ``multi_ring``.
    """

    name: str
    hosts: int
    ranks_per_host: int
    nbytes: float
    seconds: float
    n_pieces: int = 1
    dims: tuple[int, ...] | None = None

    def model_s(self, cluster: Cluster) -> float:
        """Return what the model says with the constants of ``cluster``."""
        here = dataclasses.replace(
            cluster, hosts=self.hosts, ranks_per_host=self.ranks_per_host
        )
        return allreduce_s(
            self.name, here, self.nbytes, dims=self.dims, n_pieces=self.n_pieces
        )


@dataclass(frozen=True)
class Fit:
    """Constants that were fitted.

    Attributes:
        cluster: with them.
        fitted: their names.
        uncertainty: of each, relative standard error (0.1: 10%).
        residual: root mean square of ``model / measured - 1``.
        worst: the measurement that the model misses most.
        worst_error: ``model / measured - 1`` of it.
    """

    cluster: Cluster
    fitted: tuple[str, ...]
    uncertainty: dict[str, float]
    residual: float
    worst: Measurement
    worst_error: float


def fit_constants(
    start: Cluster,
    measurements: Sequence[Measurement],
    fixed: Collection[str] = (),
) -> Fit:
    """Fit latencies and bandwidths by least squares of relative errors.

    The logarithms of the times are compared, so that small messages count as much as
    large ones, and the logarithms of the constants are sought (Levenberg, Quarterly of
    Applied Mathematics 2(2), 1944; Marquardt, SIAM J. 11(2), 1963).

    Args:
        start: what is not fitted; the shape is taken from the measurements. Its
            ``call_s`` is set to 0: what a call costs becomes part of the latencies.
        measurements: of several sizes.
        fixed: constants of :data:`CONSTANTS` that keep the value of ``start``.

    Raises:
        FitError: fewer rows or sizes than it takes, or rows that cannot tell the
            constants apart; the text says what is missing.
    """
    if "call_s" not in fixed:
        start = dataclasses.replace(start, call_s=0.0)
    names = _wanted(measurements, fixed)
    _check_sizes(measurements, names)
    best = min(
        (_descend(start, measurements, names, x) for x in _starts(measurements, names)),
        key=lambda found: found[1],
    )[0]
    cluster = _with(start, names, best)
    jacobian = _jacobian(start, measurements, names, best)
    _check_effects(jacobian, names)
    errors = np.array([m.model_s(cluster) / m.seconds - 1 for m in measurements])
    worst = int(np.argmax(np.abs(errors)))
    return Fit(
        cluster,
        names,
        _uncertainty(jacobian, names, _residuals(start, measurements, names, best)),
        float(np.sqrt(np.mean(errors**2))),
        measurements[worst],
        float(errors[worst]),
    )


# -- what can be asked of the rows ----------------------------------------------------


def _wanted(
    measurements: Sequence[Measurement], fixed: Collection[str]
) -> tuple[str, ...]:
    """Return the constants on which the times of these shapes depend."""
    several = [m for m in measurements if m.hosts * m.ranks_per_host > 1]
    if not several:
        raise FitError("no row of more than one rank: nothing travelled")
    sides = []
    if any(m.ranks_per_host > 1 for m in several):
        sides.append("intra")
    if any(m.hosts > 1 for m in several):
        sides.append("inter")
    names = [c for c in CONSTANTS if c.split("_")[0] in sides and c not in fixed]
    if not names:
        raise FitError("all constants are given; there is nothing to fit")
    return tuple(names)


def _check_sizes(measurements: Sequence[Measurement], names: Sequence[str]) -> None:
    for m in measurements:
        if not 0 < m.seconds < float("inf") or not m.nbytes >= 0:
            raise FitError(f"{m.name}, {m.nbytes:g} bytes: {m.seconds!r} seconds")
    sizes = {m.nbytes for m in measurements}
    if len(sizes) < 2:
        raise FitError(
            f"rows of {len(sizes)} size; latency and bandwidth need two or more: "
            "measure small and large messages"
        )
    if len(measurements) < len(names):
        raise FitError(
            f"{len(measurements)} rows for {len(names)} constants "
            f"({', '.join(names)}); measure more sizes and communicators"
        )


def _check_effects(jacobian: Any, names: Sequence[str]) -> None:
    """Raise an error if the others can stand in for one of the constants."""
    for i, name in enumerate(names):
        others = np.delete(jacobian, i, axis=1)
        own = jacobian[:, i]
        if others.shape[1]:
            own = own - others @ np.linalg.lstsq(others, own, rcond=None)[0]
        if np.sqrt(np.mean(own**2)) < _LEAST_EFFECT:
            raise FitError(
                f"the rows do not tell {name} from the rest: measure more sizes and "
                "more communicators (flat and hierarchical), or one host alone as "
                "well, or give its value"
            )


# -- least squares --------------------------------------------------------------------


def _starts(measurements: Sequence[Measurement], names: Sequence[str]) -> list[Any]:
    """Return logarithms to begin from: the scale of the rows, and around it."""
    fastest = max(m.nbytes / m.seconds for m in measurements)
    quickest = min(m.seconds for m in measurements)
    return [
        np.log(
            [
                quickest / 10 if name.endswith("latency_s") else fastest * factor
                for name, factor in zip(names, _factors(names, ratio), strict=True)
            ]
        )
        for ratio in (1.0, 4.0, 20.0)
    ]


def _factors(names: Sequence[str], ratio: float) -> list[float]:
    return [ratio if name.startswith("intra") else 1.0 for name in names]


def _with(start: Cluster, names: Sequence[str], logs: Any) -> Cluster:
    values = {n: float(v) for n, v in zip(names, np.exp(logs), strict=True)}
    return dataclasses.replace(start, **values)  # type: ignore[arg-type]


def _residuals(
    start: Cluster, measurements: Sequence[Measurement], names: Sequence[str], x: Any
) -> Any:
    cluster = _with(start, names, x)
    return np.array([np.log(m.model_s(cluster) / m.seconds) for m in measurements])


def _jacobian(
    start: Cluster, measurements: Sequence[Measurement], names: Sequence[str], x: Any
) -> Any:
    step = 1e-4
    columns = []
    for i in range(len(names)):
        shift = np.zeros(len(names))
        shift[i] = step
        above = _residuals(start, measurements, names, x + shift)
        below = _residuals(start, measurements, names, x - shift)
        columns.append((above - below) / (2 * step))
    return np.stack(columns, axis=1)


def _descend(
    start: Cluster, measurements: Sequence[Measurement], names: Sequence[str], x: Any
) -> tuple[Any, float]:
    """Return the logarithms of a minimum near ``x``, and the sum of squares there."""
    damping = 1e-2
    residuals = _residuals(start, measurements, names, x)
    cost = float(residuals @ residuals)
    for _ in range(_ROUNDS):
        jacobian = _jacobian(start, measurements, names, x)
        normal = jacobian.T @ jacobian
        slope = jacobian.T @ residuals
        # The floor keeps a constant without effect where it is.
        scale = np.diag(np.diag(normal) + 1e-9)
        move = np.clip(np.linalg.solve(normal + damping * scale, -slope), -1.0, 1.0)
        trial = _residuals(start, measurements, names, x + move)
        trial_cost = float(trial @ trial)
        if trial_cost < cost:
            is_done = cost - trial_cost <= 1e-9 * cost or trial_cost < _EXACT
            x, residuals, cost = x + move, trial, trial_cost
            damping = max(damping / 3, 1e-12)
            if is_done:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return x, cost


def _uncertainty(
    jacobian: Any, names: Sequence[str], residuals: Any
) -> dict[str, float]:
    n_free = max(1, len(residuals) - len(names))
    variance = float(residuals @ residuals) / n_free
    covariance = np.linalg.inv(jacobian.T @ jacobian) * variance
    return {n: float(np.sqrt(covariance[i, i])) for i, n in enumerate(names)}
