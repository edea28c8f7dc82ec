"""Numbers with units on the command line: bytes, bandwidths, durations, parts of one."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_NUMBER = re.compile(r"^\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([^\s].*?)?\s*$")
_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZES = {f"{k}B": v for k, v in {**_PREFIX, **_BINARY}.items()}
_BITS = {f"{k}bit": v / 8 for k, v in _PREFIX.items()}
_RATES = {
    f"{unit}{end}": value
    for unit, value in {**_SIZES, **_BITS}.items()
    for end in ("/s", "ps")
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
        found = _NUMBER.match(value)
        if found is None:
            self.fail(
                f"{value!r}: expected a {self.name} such as {self._example}", param, ctx
            )
        unit = found[2] or ""
        if unit not in self._units:
            what = f"no unit {unit!r} of a {self.name}" if unit else "it has no unit"
            self.fail(f"{value!r}: {what}; write {self._example}", param, ctx)
        try:
            number = float(found[1]) * self._units[unit]
        except ValueError:
            self.fail(f"{value!r}: {found[1]!r} is no number", param, ctx)
        if (
            not number < math.inf
            or number < 0
            or (number == 0 and not self._may_be_zero)
        ):
            self.fail(f"{value!r}: expected a {self.name} above 0", param, ctx)
        return number


BYTES = Quantity("size", {"": 1, **_SIZES}, "102MB or 4MiB")
BANDWIDTH = Quantity("bandwidth", _RATES, "30GB/s (bytes) or 100Gbit/s (bits)")
SECONDS = Quantity("duration", _SECONDS, "0.39s, 390ms or 15us", may_be_zero=True)


def text_of_bytes(nbytes: float) -> str:
    """Return bytes in words: ``"102.2 MB"``."""
    return _scaled(nbytes, "B")


def text_of_rate(bytes_s: float) -> str:
    """Return a bandwidth in words: ``"30 GB/s"``."""
    return "no limit" if math.isinf(bytes_s) else _scaled(bytes_s, "B/s")


def text_of_seconds(seconds: float) -> str:
    """Return a duration in words, with three digits or more: ``"12.3 ms"``."""
    for unit, worth in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= worth:
            return f"{_three_digits(seconds / worth)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def _scaled(value: float, unit: str) -> str:
    for prefix in ("T", "G", "M", "k"):
        if value >= _PREFIX[prefix]:
            return f"{_three_digits(value / _PREFIX[prefix])} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
