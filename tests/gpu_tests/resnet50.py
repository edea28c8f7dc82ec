"""The parameters of ResNet-50, whose gradients are a usual load for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def parameter_shapes() -> list[Shape]:
    """Return the shapes of the 161 parameters, 25,557,032 elements in all.

    Convolutions have no bias; each is followed by a batch normalization.

    Source: He, Zhang, Ren and Sun, arXiv 1512.03385, table 1, with the stride in the
    3x3 convolutions, which changes no shape.
    """
    return list(_parameter_shapes())


def _parameter_shapes() -> Iterator[Shape]:
    yield from _convolution(3, 64, 7)
    n_in = 64
    for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        n_out = 4 * width
        for block in range(n_blocks):
            yield from _convolution(n_in, width, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width, n_out, 1)
            if block == 0:
                # The shortcut has to change the number of channels, too.
                yield from _convolution(n_in, n_out, 1)
            n_in = n_out
    yield from ((1000, n_in), (1000,))


def _convolution(n_in: int, n_out: int, size: int) -> Iterator[Shape]:
    yield from ((n_out, n_in, size, size), (n_out,), (n_out,))
