"""Reducing and broadcasting many arrays at once, through buckets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import Agreement, digest_of
from communicators.arguments import check_root
from communicators.array_reductions import check_device
from communicators.bucket_flow import run_buckets
from communicators.buckets import ArraySpec, Bucket, plan_buckets
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import Device
from communicators.devices.kinds import CPU, as_array, kind_of
from communicators.dtypes import (
    check_fixed_size,
    check_op,
    result_dtype,
    wire_dtype,
)
from communicators.errors import CommunicatorError
from communicators.overlapping import overlapping
from communicators.transports import load

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase
    from communicators.transports.same_host import SameHostTransport


_MAX_CACHED = 64


class ManyArrays:
    """``allreduce_arrays`` and ``bcast_arrays`` of one communicator.

    Digests and bucket plans are kept: a training loop passes the same specs at every
    step.
    """

    def __init__(self, comm: CommunicatorBase, agreement: Agreement) -> None:
        self._comm = comm
        self._agreement = agreement
        self._digests: dict[Any, bytes] = {}
        self._plans: dict[Any, Any] = {}
        # Pairs of dtype and operation that have been found to go together.
        self._reducible: set[tuple[np.dtype[Any], str]] = set()

    def allreduce(
        self,
        arrays: Sequence[Any],
        op: str,
        names: Sequence[str] | None,
        label: str,
        groups: Sequence[int] | None = None,
    ) -> list[Any]:
        error: Exception | None = None
        groups = () if groups is None else tuple(groups)
        names = _default_names(arrays, names)
        device = self._comm.devices.host
        given = arrays
        try:
            check_op(op)
            _check_names(names, arrays, label)
            if groups and (min(groups) < 0 or sum(groups) != len(arrays)):
                raise ValueError(
                    f"{label}: groups of {list(groups)} arrays; there are {len(arrays)}"
                )
            arrays = _as_arrays(names, arrays, label)
            self._check_reducible(names, arrays, op, label)
            device = self._comm.devices.for_arrays(arrays, label)
            check_device(self._comm, device, label)
            self._check_kind(device, label)
        except (TypeError, ValueError, CommunicatorError) as failure:
            error = failure
        present = [not isinstance(array, ArraySpec) for array in arrays]
        key = () if error else _key(names, arrays)
        begun_ns = time.perf_counter_ns()
        union = self._agreement.check(
            f"{label}, {op}, on the wire {self._comm.allreduce_grad_dtype}"
            + (f", in groups of {_shortened(groups)}" if groups else ""),
            () if error else _LazyDetails(key),
            digest=self._digest(key),
            error=error,
            presence=present,
            shown=lambda: f"{len(key)} arrays",
        )
        assert union is not None
        self._record("agreement", begun_ns, "communication")
        self._comm.nccl.open(device)
        sources: list[Any] = [
            array if here else None for array, here in zip(arrays, present, strict=True)
        ]
        scale = 1.0 / self._comm.size if op == "mean" else None
        op = "sum" if op == "mean" else op
        with self._comm.nccl.working_on(device):
            results: list[Any] = [
                device.xp.empty(array.shape, array.dtype)
                if source is None and wanted
                else source
                for array, source, wanted in zip(arrays, sources, union, strict=True)
            ]
            shared = [] if device.uses_nccl else overlapping(results)
            for i in shared:
                # Written in place, each would change the other while it is read.
                results[i] = results[i].copy()
                if sources[i] is not None:
                    sources[i] = results[i]
            wire = self._wire(device, op)
            group = None if device.uses_nccl else self._comm.in_place_group()
            if group is not None and group.same_host is not None:
                kept = [i for i, wanted in enumerate(union) if wanted]
                self._reduce_in_place(
                    group.same_host, key, kept, sources, results, wire, op, scale
                )
            elif group is None or group.size > 1 or _narrows(arrays, wire):
                self._reduce_buckets(
                    device,
                    (key, groups),
                    union,
                    arrays,
                    sources,
                    results,
                    wire,
                    op,
                    scale,
                )
        for i in shared:
            np.copyto(arrays[i], results[i])
        return [
            array if here else result
            for array, here, result in zip(given, present, results, strict=True)
        ]

    def bcast(
        self,
        arrays: Sequence[Any],
        root: int,
        names: Sequence[str] | None,
        label: str,
    ) -> None:
        error: Exception | None = None
        names = _default_names(arrays, names)
        device = self._comm.devices.host
        try:
            check_root(root, self._comm.size, label)
            _check_names(names, arrays, label)
            arrays = _as_arrays(names, arrays, label)
            for name, array in zip(names, arrays, strict=True):
                _check_writable(name, array, label)
                check_fixed_size(array.dtype, label)
            device = self._comm.devices.for_arrays(arrays, label)
        except (TypeError, ValueError, CommunicatorError) as failure:
            error = failure
        key = () if error else _key(names, arrays)
        self._agreement.check(
            f"{label}, root={root}",
            () if error else _LazyDetails(key),
            digest=self._digest(key),
            error=error,
            shown=lambda: f"{len(key)} arrays",
        )
        if device.uses_nccl:
            self._comm.nccl.open(device)
            with self._comm.nccl.working_on(device):
                self._bcast_by_nccl(device, arrays, root)
            return
        ring = self._comm.world_ring()
        for array in arrays:
            if array.size == 0:
                continue
            flat = np.ascontiguousarray(array).reshape(-1)
            steps = ring.broadcast(flat, self._comm.next_tag(), root)
            self._comm.start_steps(steps).wait()
            if self._comm.rank != root and not np.shares_memory(flat, array):
                np.copyto(array, flat.reshape(array.shape))

    def _check_reducible(
        self, names: Sequence[str], arrays: Sequence[Any], op: str, label: str
    ) -> None:
        known = self._reducible
        for name, array in zip(names, arrays, strict=True):
            if (
                type(array) is np.ndarray
                and (array.dtype, op) in known
                and array.flags.writeable
            ):
                continue
            _check_reducible(name, array, op, label)
            known.add((array.dtype, op))

    def _check_kind(self, device: Device, label: str) -> None:
        if not device.uses_nccl and device.kind not in self._comm.device_types:
            raise TypeError(
                f"{label}: {self._comm.name} averages arrays on GPUs only; these are "
                f"in {device}. Move the model to the GPU, or use the communicator "
                "'flat' or 'auto', which take both kinds"
            )

    def _bcast_by_nccl(self, device: Device, arrays: Sequence[Any], root: int) -> None:
        """Broadcast buckets, each made and undone by one kernel."""
        nccl = self._comm.nccl.world
        specs = [ArraySpec.of(array) for array in arrays]
        # The bytes of an array as they are, whatever they mean.
        for bucket in plan_buckets(
            [(i, s.n_elems, s.dtype) for i, s in enumerate(specs) if s.nbytes],
            self._comm.bucket_bytes,
        ):
            buffer = device.take(bucket.n_elems, bucket.dtype, 1)
            if self._comm.rank == root:
                device.pack(bucket, arrays, buffer)
            if nccl is not None:
                self._comm.start_steps(nccl.broadcast(buffer, 0, root)).wait()
            else:
                self._bcast_through_host(buffer, root)
            if self._comm.rank != root:
                device.unpack(bucket, arrays, buffer)
            device.give_back(buffer)

    def _bcast_through_host(self, buffer: DeviceBuffer, root: int) -> None:
        side = self._comm.nccl
        if self._comm.rank == root:
            host = side.to_host(buffer)
        else:
            host = side.device.host_buffer(buffer.size, buffer.dtype)
        ring = self._comm.world_ring().mpi
        data = host.view(np.uint8)
        steps = ring.broadcast(data, self._comm.next_tag(), root)
        self._comm.start_steps(steps).wait()
        side.device.copy_from_host(host, buffer)

    def _reduce_in_place(
        self,
        transport: SameHostTransport,
        key: Any,
        kept: Sequence[int],
        sources: Sequence[Any],
        results: Sequence[Any],
        wire: np.dtype[Any] | None,
        op: str,
        scale: float | None,
    ) -> None:
        """Reduce the arrays where they are: no buckets, and nothing is packed."""
        begun_ns = time.perf_counter_ns()
        arrays = []
        for i in kept:
            if sources[i] is None:
                results[i].fill(0)
            arrays.append(np.ascontiguousarray(results[i]))
        cache_key = (key, tuple(kept), wire)
        plan = self._plans.get(cache_key)
        if plan is None:
            plan = load("host_arrays").ArraysPlan(
                [(a.size, a.dtype, wire_dtype(a.dtype, wire)) for a in arrays],
                transport.size,
            )
            self._keep_plan(cache_key, plan)
        steps = transport.reduce_arrays(plan, arrays, op, scale, self._comm.next_tag())
        self._comm.start_steps(steps).wait()
        for i, array in zip(kept, arrays, strict=True):
            if array is not results[i] and not np.shares_memory(array, results[i]):
                np.copyto(results[i], array.reshape(results[i].shape))
        self._record(
            "reduce",
            begun_ns,
            "communication",
            nbytes=sum(array.nbytes for array in arrays),
        )

    def _reduce_buckets(
        self,
        device: Any,
        key: Any,
        union: list[bool],
        arrays: Sequence[Any],
        sources: Sequence[Any],
        results: Sequence[Any],
        wire: np.dtype[Any] | None,
        op: str,
        scale: float | None,
    ) -> None:
        def plan_of(comm: CommunicatorBase) -> list[Bucket]:
            cuts = not device.uses_nccl
            return self._plan(key, union, arrays, wire, comm.bucket_bytes, cuts)

        def measure(comm: CommunicatorBase) -> float:
            plan = plan_of(comm)
            # Only the time counts: all arrays may go into the same memory.
            longest = max((a.nbytes for a in arrays), default=0)
            aside = np.empty(longest, np.uint8)
            targets = [
                None if r is None else aside[: r.nbytes].view(r.dtype).reshape(r.shape)
                for r in results
            ]
            start_s = time.perf_counter()
            run_buckets(comm, device, plan, sources, targets, op, scale, None)
            return time.perf_counter() - start_s

        comm = self._comm
        if not device.uses_nccl:
            nbytes = sum(
                ArraySpec.of(array).nbytes
                for array, wanted in zip(arrays, union, strict=True)
                if wanted
            )
            comm = comm.reducer_for(nbytes, measure)
        run_buckets(
            comm, device, plan_of(comm), sources, results, op, scale, self._record
        )

    def _record(self, name: str, begun_ns: int, lane: str, **details: Any) -> None:
        recorder = self._comm.recorder
        if recorder is not None:
            recorder.record(name, begun_ns, time.perf_counter_ns(), lane, **details)

    def _digest(self, key: Any) -> bytes:
        digest = self._digests.get(key)
        if digest is None:
            if len(self._digests) >= _MAX_CACHED:
                self._digests.clear()
            digest = self._digests[key] = digest_of(list(_LazyDetails(key)))
        return digest

    def _wire(self, device: Device, op: str) -> np.dtype[Any] | None:
        """Return the dtype that the ranks have chosen for the wire, if any."""
        if device.uses_nccl and op in ("max", "min"):
            # Compared as integers, which NCCL has of 32 and 64 bits.
            return None
        return self._comm.allreduce_grad_dtype

    def _plan(
        self,
        key: Any,
        union: list[bool],
        arrays: Sequence[Any],
        wire: np.dtype[Any] | None,
        bucket_bytes: int,
        cuts: bool,
    ) -> list[Bucket]:
        cache_key = (key, tuple(union), bucket_bytes, wire)
        plan: list[Bucket] | None = self._plans.get(cache_key)
        if plan is None:
            plan = plan_buckets(
                [
                    (
                        index,
                        ArraySpec.of(array).n_elems,
                        wire_dtype(array.dtype, wire),
                    )
                    for index, array in enumerate(arrays)
                    if union[index]
                ],
                bucket_bytes,
                cuts=cuts,
                groups=key[1],
            )
            self._keep_plan(cache_key, plan)
        return plan

    def _keep_plan(self, cache_key: Any, plan: Any) -> None:
        if len(self._plans) >= _MAX_CACHED:
            self._plans.clear()
        self._plans[cache_key] = plan


class _LazyDetails(Sequence[tuple[str, str]]):
    """Names and specs as text, made only when an error needs them."""

    def __init__(self, key: Sequence[tuple[str, tuple[int, ...], Any, str]]) -> None:
        self._key = key

    def __len__(self) -> int:
        return len(self._key)

    def __getitem__(self, index: Any) -> Any:
        name, shape, dtype, kind = self._key[index]
        return name, str(ArraySpec(shape, dtype, kind))


def _key(names: Sequence[str], arrays: Sequence[Any]) -> Any:
    return tuple(
        (
            name,
            array.shape,
            array.dtype,
            CPU
            if type(array) is np.ndarray
            else array.kind
            if isinstance(array, ArraySpec)
            else kind_of(array),
        )
        for name, array in zip(names, arrays, strict=True)
    )


def _as_arrays(
    names: Sequence[str], arrays: Sequence[Any], label: str
) -> Sequence[Any]:
    """Let GPU arrays of other packages be arrays of CuPy; leave specs alone."""
    return [
        array if type(array) is np.ndarray else _as_one_array(name, array, label)
        for name, array in zip(names, arrays, strict=True)
    ]


def _as_one_array(name: str, array: Any, label: str) -> Any:
    if isinstance(array, np.generic):
        raise TypeError(
            f"{label}: {name} is a scalar of NumPy, which cannot be written in "
            "place; give an array of shape ()"
        )
    if isinstance(array, ArraySpec | np.ndarray):
        return array
    return as_array(array, f"{label}: {name}")


def _shortened(groups: Sequence[int]) -> str:
    """Return the groups as text that is short and tells them apart."""
    text = ", ".join(map(str, groups))
    return text if len(text) < 60 else f"{text[:40]}... ({digest_of(text).hex()[:8]})"


def _narrows(arrays: Sequence[Any], wire: np.dtype[Any] | None) -> bool:
    """Tell whether the wire rounds some array."""
    return any(
        not np.can_cast(array.dtype, wire_dtype(array.dtype, wire), "safe")
        for array in arrays
    )


def _default_names(arrays: Sequence[Any], names: Sequence[str] | None) -> Sequence[str]:
    if names is None:
        return [f"array {i}" for i in range(len(arrays))]
    return names


def _check_names(names: Sequence[str], arrays: Sequence[Any], label: str) -> None:
    if len(names) != len(arrays):
        raise ValueError(f"{label}: {len(names)} names for {len(arrays)} arrays")
    seen: dict[int, str] = {}
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, ArraySpec) and id(array) in seen:
            raise ValueError(
                f"{label}: {seen[id(array)]} and {name} are the same array, which is "
                "written in place; give it once"
            )
        seen[id(array)] = name


def _check_writable(name: str, array: Any, label: str) -> None:
    if not getattr(array.flags, "writeable", True):
        raise ValueError(f"{label}: {name} is read-only; it is written in place")


def _check_reducible(name: str, array: Any, op: str, label: str) -> None:
    if isinstance(array, ArraySpec):
        if op not in ("sum", "mean"):
            raise ValueError(
                f"{label}: {name} is missing here; only sum and mean take that"
            )
    else:
        _check_writable(name, array, label)
    if result_dtype(array.dtype, op, label) != array.dtype:
        raise TypeError(
            f"{label}: {name}: the {op} of {array.dtype} has another dtype, so it "
            "cannot be written in place"
        )
