"""Rows of ``chainermn-ng bench --json`` as measurements for the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from communicators.bench_results import Results, Row, read_results
from communicators.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from communicators.cost_fit import Fit, FitError, Measurement, fit_constants
from communicators.cost_model import MODELLED, Cluster
from communicators.dtypes import parse_wire_dtype, wire_dtype
from communicators.errors import TopologyError
from communicators.gradient_sets import shapes_of
from communicators.multi_ring import number_of_chunks
from communicators.topology import Topology, default_dims, parse_dims

_OPERATION = "allreduce_arrays"


@dataclass(frozen=True)
class Measured:
    """What one file holds for the model.

    Attributes:
        path: of the file.
        topology: the ranks and hosts that it was measured on.
        device: ``"cpu"`` or ``"gpu"``.
        is_pretended: the topology is not that of the machines.
        measurements: rows that the model has formulas for.
    """

    path: str
    topology: Topology
    device: str
    is_pretended: bool
    measurements: tuple[Measurement, ...]


def read_measured(path: str) -> Measured:
    """Read a file of ``chainermn-ng bench --json``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, or has no row for the model.
    """
    results = read_results(path)
    try:
        topology = Topology.parse(str(results.machine["topology"]), results.size)
        n_real = len(results.machine["hosts"])
        device = str(results.machine["device"])
    except (KeyError, TypeError, TopologyError) as error:
        raise ValueError(f"{path}: of its machine: {error}") from error
    if not topology.is_uniform:
        raise FitError(
            f"{path}: hosts of {topology} ranks; the model needs the same number of "
            "ranks on every host"
        )
    found = tuple(
        _measurement(row, topology, device)
        for row in results.rows
        if _is_for_model(row)
    )
    if not found:
        raise FitError(
            f"{path}: no row for the model, which takes {_OPERATION} of "
            f"{', '.join(MODELLED)}; it has {_contents(results)}"
        )
    return Measured(path, topology, device, n_real != topology.n_hosts, found)


def _contents(results: Results) -> str:
    found = {f"{row.operation} of {row.communicator}" for row in results.rows}
    return ", ".join(sorted(found)) or "no rows"


def _is_for_model(row: Row) -> bool:
    # `naive` sends arrays one by one; `pure_nccl` changes its algorithm by itself.
    return (
        bool(row.times_s)
        and row.operation == _OPERATION
        and row.communicator in MODELLED
        and row.communicator not in ("naive", "pure_nccl")
    )


def _measurement(row: Row, topology: Topology, device: str) -> Measurement:
    dtype = np.dtype(row.dtype)
    wire = wire_dtype(dtype, parse_wire_dtype(row.wire_dtype))
    nbytes = row.nbytes // dtype.itemsize * wire.itemsize
    dims = None
    if row.communicator == "multi_ring":
        given = row.options.get("dims")
        dims = (
            default_dims(topology)
            if given is None
            else parse_dims(given, topology.size)
        )
    # In one host the CPU's arrays are reduced where they are, without buckets.
    is_in_place = device == "cpu" and topology.n_hosts == 1
    return Measurement(
        row.communicator,
        topology.n_hosts,
        topology.host_sizes[0],
        nbytes,
        row.time_s,
        1 if is_in_place else _n_pieces(row, dtype, wire, device),
        dims,
    )


def _n_pieces(row: Row, dtype: np.dtype, wire: np.dtype, device: str) -> int:
    """Return in how many buckets, and chunks of these, the engine sends a row."""
    if row.load is not None:
        n_elems = [int(np.prod(shape, dtype=np.int64)) for shape in shapes_of(row.load)]
    else:
        n_elems = [row.nbytes // dtype.itemsize // row.n_arrays] * row.n_arrays
    bucket_bytes = row.options.get("bucket_bytes", DEFAULT_BUCKET_BYTES)
    sizes = [(i, n, wire) for i, n in enumerate(n_elems)]
    buckets = plan_buckets(sizes, bucket_bytes, cuts=device == "cpu")
    if row.communicator != "multi_ring":
        return max(1, len(buckets))
    n_chunks, on_device = row.options.get("n_chunks"), device != "cpu"
    return max(
        1,
        sum(number_of_chunks(b.nbytes, n_chunks, on_device=on_device) for b in buckets),
    )


def fit_measured(
    start: Cluster,
    measured: Sequence[Measured],
    fixed: Sequence[str],
    shared_memory: bool | None,
) -> Fit:
    """Fit the model's constants to all files.

    Args:
        start: what is not fitted.
        measured: the files.
        fixed: constants that are given.
        shared_memory: whether the ranks of a host reduce through common memory;
            ``None``: what fits better.

    Raises:
        FitError: the rows do not suffice.
    """
    rows = [m for one in measured for m in one.measurements]
    ways = (False, True) if shared_memory is None else (shared_memory,)
    fits: list[Fit] = []
    for way in ways:
        try:
            fits.append(fit_constants(replace(start, shared_memory=way), rows, fixed))
        except FitError:
            # The other way may do; the error of the last one is as good as any.
            if way == ways[-1] and not fits:
                raise
    return min(fits, key=lambda fit: fit.residual)
