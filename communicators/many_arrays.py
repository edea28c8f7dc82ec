"""Reducing and broadcasting many arrays at once, through buckets."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from communicators.agreement import Agreement, digest_of
from communicators.arguments import check_root
from communicators.array_calls import (
    ArraysCall,
    CallCache,
    as_arrays,
    check_names,
    check_reducible,
    check_writable,
    default_names,
)
from communicators.array_reductions import check_device
from communicators.bucket_flow import run_buckets
from communicators.buckets import ArraySpec, Bucket, plan_buckets
from communicators.devices.buffer import DeviceBuffer
from communicators.devices.device import Device
from communicators.dtypes import Array, check_fixed_size, check_op, wire_dtype
from communicators.overlapping import overlapping
from communicators.transports import load

if TYPE_CHECKING:
    from communicators.base import CommunicatorBase
    from communicators.transports.same_host import SameHostTransport


class ManyArrays:
    """``allreduce_arrays`` and ``bcast_arrays`` of one communicator.

    What a call was found to be is kept: a training loop makes the same at every step.
    """

    def __init__(self, comm: CommunicatorBase, agreement: Agreement) -> None:
        self._comm = comm
        self._agreement = agreement
        self._calls = CallCache()

    def allreduce(
        self,
        arrays: Sequence[Any],
        op: str,
        names: Sequence[str] | None,
        label: str,
        groups: Sequence[int] | None = None,
    ) -> list[Any]:
        device = self._comm.devices.host
        all_own = False
        error: Exception | None = None
        wire = self._comm.allreduce_grad_dtype
        lengths: tuple[int, ...] = ()
        # Whatever is wrong here: alone, this rank would leave the others waiting.
        try:
            arrays = given = list(arrays)
            names = None if names is None else [str(name) for name in names]
            lengths = _as_numbers(groups, label)
            settings = (label, op, lengths, wire)
            call, all_own = self._calls.known(arrays, settings, names)
            if call is None:
                arrays, device = self._checked(arrays, op, names, label, lengths)
                title = _title(label, op, wire, lengths)
                call = self._calls.add(title, settings, names, arrays, lengths)
        except Exception as failure:
            error = failure
            call = ArraysCall(_title(label, op, wire, lengths), (), ())
        begun_ns = time.perf_counter_ns()
        union = self._agreement.check(
            call.title,
            call.details,
            digest=call.digest,
            error=error,
            presence=call.present,
            shown=call.shown,
        )
        assert union is not None
        self._comm.prepare(device)
        self._record("agreement", begun_ns, "communication")
        with self._comm.nccl.working_on(device):
            results = self._reduce(device, call, union, arrays, op, all_own)
        return [
            array if here else result
            for array, here, result in zip(given, call.present, results, strict=True)
        ]

    def _reduce(
        self,
        device: Device,
        call: ArraysCall,
        union: Sequence[bool],
        arrays: Sequence[Any],
        op: str,
        all_own: bool,
    ) -> Sequence[Any]:
        """Reduce what the ranks have agreed on; return the arrays, also new ones."""
        scale = 1.0 / self._comm.size if op == "mean" else None
        op = "sum" if op == "mean" else op
        sources: list[Any] = list(arrays)
        results: list[Any] = sources
        if not all(call.present):
            sources = [
                array if here else None
                for array, here in zip(arrays, call.present, strict=True)
            ]
            results = [
                device.xp.empty(array.shape, array.dtype)
                if source is None and wanted
                else source
                for array, source, wanted in zip(arrays, sources, union, strict=True)
            ]
        shared = [] if all_own or device.uses_nccl else overlapping(results)
        if shared:
            # Written in place, each would change the other while it is read.
            results = list(results)
            for i in shared:
                results[i] = results[i].copy()
                if sources[i] is not None:
                    sources[i] = results[i]
        wire = self._wire(device, op)
        group = None if device.uses_nccl else self._comm.in_place_group()
        if group is not None and group.same_host is not None:
            self._reduce_in_place(
                group.same_host, call, union, sources, results, wire, op, scale
            )
        elif group is None or group.size > 1 or _narrows(arrays, wire):
            self._reduce_buckets(
                device, call, union, arrays, sources, results, wire, op, scale
            )
        for i in shared:
            np.copyto(arrays[i], results[i])
        return results

    def _checked(
        self,
        arrays: Sequence[Any],
        op: str,
        names: Sequence[str] | None,
        label: str,
        groups: Sequence[int],
    ) -> tuple[Sequence[Any], Device]:
        """Return the arrays to work on, and their device.

        Raises:
            TypeError, ValueError, CommunicatorError: for all ranks.
        """
        names = default_names(arrays, names)
        check_op(op)
        check_names(names, arrays, label)
        if groups and (min(groups) < 0 or sum(groups) != len(arrays)):
            raise ValueError(
                f"{label}: groups of {list(groups)} arrays; there are {len(arrays)}"
            )
        arrays = as_arrays(names, arrays, label)
        for name, array in zip(names, arrays, strict=True):
            check_reducible(name, array, op, label)
        device = self._comm.devices.for_arrays(arrays, label)
        check_device(self._comm, device, label)
        self._check_kind(device, label)
        return arrays, device

    def bcast(
        self,
        arrays: Sequence[Any],
        root: int,
        names: Sequence[str] | None,
        label: str,
    ) -> None:
        error: Exception | None = None
        device = self._comm.devices.host
        title = f"{label}, root={root}"
        try:
            check_root(root, self._comm.size, label)
            arrays = list(arrays)
            names = None if names is None else [str(name) for name in names]
            given_names = default_names(arrays, names)
            check_names(given_names, arrays, label)
            arrays = as_arrays(given_names, arrays, label)
            for name, array in zip(given_names, arrays, strict=True):
                check_writable(name, array, label)
                check_fixed_size(array.dtype, label)
            device = self._comm.devices.for_arrays(arrays, label)
            call = self._calls.add(title, (title,), names, arrays)
        except Exception as failure:
            error = failure
            call = ArraysCall(title, (), ())
        self._agreement.check(
            title,
            call.details,
            digest=call.digest,
            error=error,
            shown=call.shown,
        )
        self._comm.prepare(device, by_ring=True)
        with self._comm.nccl.working_on(device):
            if device.uses_nccl:
                self._bcast_by_nccl(device, arrays, root)
            else:
                self._bcast_by_mpi(arrays, root)

    def _bcast_by_mpi(self, arrays: Sequence[Array], root: int) -> None:
        ring = self._comm.world_ring()
        for array in arrays:
            if array.size == 0:
                continue
            flat = np.ascontiguousarray(array).reshape(-1)
            steps = ring.broadcast(flat, self._comm.next_tag(), root)
            self._comm.start_steps(steps).wait()
            if self._comm.rank != root and not np.shares_memory(flat, array):
                np.copyto(array, flat.reshape(array.shape))

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
        call: ArraysCall,
        union: Sequence[bool],
        sources: Sequence[Any],
        results: Sequence[Any],
        wire: np.dtype[Any] | None,
        op: str,
        scale: float | None,
    ) -> None:
        """Reduce the arrays where they are: no buckets, and nothing is packed."""
        begun_ns = time.perf_counter_ns()
        kept = [i for i, wanted in enumerate(union) if wanted]
        arrays = []
        for i in kept:
            if sources[i] is None:
                results[i].fill(0)
            arrays.append(np.ascontiguousarray(results[i]))
        plan = call.plan(
            (tuple(kept), wire),
            lambda: load("host_arrays").ArraysPlan(
                [(a.size, a.dtype, wire_dtype(a.dtype, wire)) for a in arrays],
                transport.size,
            ),
        )
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
        call: ArraysCall,
        union: Sequence[bool],
        arrays: Sequence[Any],
        sources: Sequence[Any],
        results: Sequence[Any],
        wire: np.dtype[Any] | None,
        op: str,
        scale: float | None,
    ) -> None:
        def plan_of(comm: CommunicatorBase) -> list[Bucket]:
            def make() -> list[Bucket]:
                sizes = [
                    (i, ArraySpec.of(array).n_elems, wire_dtype(array.dtype, wire))
                    for i, array in enumerate(arrays)
                    if union[i]
                ]
                cuts = not device.uses_nccl
                return plan_buckets(
                    sizes, comm.bucket_bytes, cuts=cuts, groups=call.groups
                )

            plan: list[Bucket] = call.plan(
                (tuple(union), comm.bucket_bytes, wire), make
            )
            return plan

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
            nbytes = sum([array.nbytes for array in results if array is not None])
            comm = comm.reducer_for(nbytes, measure)
        recorder = self._comm.recorder
        run_buckets(
            comm,
            device,
            plan_of(comm),
            sources,
            results,
            op,
            scale,
            None if recorder is None else self._record,
        )

    def _record(self, name: str, begun_ns: int, lane: str, **details: Any) -> None:
        recorder = self._comm.recorder
        if recorder is not None:
            recorder.record(name, begun_ns, time.perf_counter_ns(), lane, **details)

    def _wire(self, device: Device, op: str) -> np.dtype[Any] | None:
        """Return the dtype that the ranks have chosen for the wire, if any."""
        if device.uses_nccl and op in ("max", "min"):
            # Compared as integers, which NCCL has of 32 and 64 bits.
            return None
        return self._comm.allreduce_grad_dtype


def _as_numbers(groups: Any, label: str) -> tuple[int, ...]:
    try:
        return () if groups is None else tuple(operator.index(n) for n in groups)
    except TypeError:
        raise TypeError(
            f"{label}: groups {groups!r}: expected numbers of arrays, such as [3, 5]"
        ) from None


def _title(label: str, op: str, wire: Any, groups: Sequence[int]) -> str:
    title = f"{label}, {op}, on the wire {wire}"
    return f"{title}, in groups of {_shortened(groups)}" if groups else title


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
