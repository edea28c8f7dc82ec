"""Sets of float32 arrays to reduce."""

from __future__ import annotations

from collections.abc import Callable

from communicators import gradient_sets

Shape = tuple[int, ...]

SETS: dict[str, Callable[[], list[Shape]]] = {
    # 161 arrays, 25,557,032 elements.
    "resnet50": lambda: gradient_sets.shapes_of("resnet50"),
    "16MiB": lambda: [(512, 512)] * 16,
    # 16,384 elements in 20 arrays.
    "64KiB": lambda: [*[(820,)] * 16, *[(816,)] * 4],
}


def shapes_of(name: str) -> list[Shape]:
    """Return the shapes of a set's arrays, all float32."""
    return SETS[name]()


def nbytes_of(name: str) -> int:
    """Return the bytes of a set's arrays together."""
    total = 0
    for shape in shapes_of(name):
        n_elems = 1
        for length in shape:
            n_elems *= length
        total += 4 * n_elems
    return total
