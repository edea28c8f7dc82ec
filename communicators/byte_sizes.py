"""Numbers of bytes as people write them: ``64MiB``, ``1 GB``."""

from __future__ import annotations

import re

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS = {"": 1, "B": 1, **_BINARY, **_DECIMAL, "KB": 10**3}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?) *([a-zA-Z]*)")

#: Factor between the neighbours of a range of sizes.
STEP = 4


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    Args:
        text: a number, alone or with one of the units B, kB, MB, GB (powers of 1000),
            KiB, MiB, GiB (powers of 1024), in any case.

    Raises:
        ValueError: anything else, and what is no whole number of bytes.
    """
    match = _NUMBER.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"{text!r} is no number of bytes; expected one such as 4096, 64KiB or 1MB"
        )
    value = float(match[1]) * factor
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(value)


def parse_sizes(text: str) -> list[int]:
    """Read sizes: ``"1KiB:64MiB"`` (powers of 4 apart), ``"1KiB,1MB"``, or both.

    Returns:
        In the order given, each size once. A range ends with the last step that does
        not exceed its end.

    Raises:
        ValueError: malformed, below 1 byte, or a range from large to small.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        size = parse_bytes(first)
        end = parse_bytes(last) if colon else size
        if size < 1 or end < size:
            raise ValueError(f"sizes {part!r}: expected SMALL:LARGE of 1 byte or more")
        while size <= end:
            sizes.append(size)
            size *= STEP
    return list(dict.fromkeys(sizes))


def format_bytes(nbytes: int) -> str:
    """Return ``"64 KiB"`` where that is exact, else ``"102.2 MB"``."""
    for unit, factor in reversed(_BINARY.items()):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    for unit, factor in reversed(_DECIMAL.items()):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"
