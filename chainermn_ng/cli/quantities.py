"""Numbers with units on the command line: bytes, bandwidths, durations."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from communicators.byte_sizes import parse_bytes

_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*")
_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Case tells bits from bytes: "Gb/s" could be meant either way, so it is refused.
_PER_SECOND = {
    **{f"{prefix}B": value for prefix, value in {**_PREFIXES, **_BINARY}.items()},
    **{f"{prefix}bit": value / 8 for prefix, value in _PREFIXES.items()},
}
_RATES = {
    f"{unit}{end}": value for unit, value in _PER_SECOND.items() for end in ("/s", "ps")
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}


class Quantity(click.ParamType[float]):
    """A number with a unit.

    Args:
        name: what it is, for help and errors.
        units: unit -> what it is worth.
        example: for errors.
        may_be_zero: 0 is allowed.
    """

    def __init__(
        self,
        name: str,
        units: dict[str, float],
        example: str,
        may_be_zero: bool = False,
    ) -> None:
        self.name = name
        self._units = units
        self._example = example
        self._may_be_zero = may_be_zero

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = _NUMBER.fullmatch(value)
        unit = found[2] if found else ""
        if found is None or found[1].count(".") > 1:
            what = f"no {self.name}"
        elif unit not in self._units:
            what = f"no unit {unit!r} of a {self.name}" if unit else "it has no unit"
        else:
            number = float(found[1]) * self._units[unit]
            if math.isfinite(number) and (number > 0 or self._may_be_zero):
                return number
            what = f"a {self.name} is above 0"
        return self.fail(f"{value!r}: {what}; write {self._example}", param, ctx)


class _Bytes(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        try:
            nbytes = parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if nbytes < 1:
            self.fail(f"{value!r}: expected 1 byte or more", param, ctx)
        return nbytes


BYTES = _Bytes()
BANDWIDTH = Quantity("bandwidth", _RATES, "30GB/s (bytes) or 100Gbit/s (bits)")
SECONDS = Quantity("duration", _SECONDS, "0.39s, 390ms or 15us", may_be_zero=True)


def format_rate(bytes_s: float) -> str:
    """Return a bandwidth in words: ``"30.0 GB/s"``."""
    if math.isinf(bytes_s):
        return "no limit"
    for prefix in ("T", "G", "M", "k"):
        if bytes_s >= _PREFIXES[prefix]:
            return f"{bytes_s / _PREFIXES[prefix]:.3g} {prefix}B/s"
    return f"{bytes_s:.3g} B/s"
