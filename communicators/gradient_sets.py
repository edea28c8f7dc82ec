"""Shapes of the parameters of well-known networks: real loads for measurements.

Arrays come in forward order: that of the layers from the input to the loss, and in a
layer the weight, then the bias (or a normalization's scale, then its shift).

================  ======  ===========  ===============================================
name              arrays  elements     source
================  ======  ===========  ===============================================
resnet50          161     25,557,032   He, Zhang, Ren and Sun, arXiv 1512.03385, table 1
vgg16             32      138,357,544  Simonyan and Zisserman, arXiv 1409.1556, D
transformer-base  181     63,045,632   Vaswani et al., arXiv 1706.03762, table 3
================  ======  ===========  ===============================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Shape = tuple[int, ...]


def shapes_of(name: str) -> list[Shape]:
    """Return the shapes of a network's parameters in forward order.

    Args:
        name: one of :data:`GRADIENT_SETS`.

    Raises:
        ValueError: no such name; the text lists the known ones.
    """
    if name not in GRADIENT_SETS:
        raise ValueError(
            f"no gradient set {name!r}; known: {', '.join(sorted(GRADIENT_SETS))}"
        )
    return list(GRADIENT_SETS[name]())


# -- ResNet-50: convolutions have no bias; each is followed by a batch normalization.
# The stride may be in the 1x1 or the 3x3 convolutions: that changes no shape.


def _resnet50() -> Iterator[Shape]:
    yield from _convolution_and_norm(3, 64, 7)
    n_in = 64
    for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        n_out = 4 * width
        for block in range(n_blocks):
            yield from _convolution_and_norm(n_in, width, 1)
            yield from _convolution_and_norm(width, width, 3)
            yield from _convolution_and_norm(width, n_out, 1)
            if block == 0:
                # The shortcut has to change the number of channels, too.
                yield from _convolution_and_norm(n_in, n_out, 1)
            n_in = n_out
    yield from _linear(n_in, 1000)


def _convolution_and_norm(n_in: int, n_out: int, size: int) -> Iterator[Shape]:
    yield from ((n_out, n_in, size, size), (n_out,), (n_out,))


# -- VGG-16, configuration D: 13 convolutions of 3x3 with bias, 3 linear layers.


def _vgg16() -> Iterator[Shape]:
    n_in = 3
    for width, n_layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(n_layers):
            yield from ((width, n_in, 3, 3), (width,))
            n_in = width
    # Five halvings of 224 pixels leave 7x7.
    yield from _linear(512 * 7 * 7, 4096)
    yield from _linear(4096, 4096)
    yield from _linear(4096, 1000)


# -- Transformer, base model. One 37000-token embedding serves the encoder, the decoder
# and (without a bias) the projection before the softmax; positions are sinusoids,
# without parameters. Attention: queries, keys, values and output, 512x512 each,
# without bias, as in the paper's equations. Feed-forward: 512 -> 2048 -> 512 with
# biases. A layer normalization (scale, shift) follows each sub-layer, and none more.

_VOCABULARY, _D_MODEL, _D_FF, _N_LAYERS = 37000, 512, 2048, 6


def _transformer_base() -> Iterator[Shape]:
    yield (_VOCABULARY, _D_MODEL)
    for n_attentions in (1,) * _N_LAYERS + (2,) * _N_LAYERS:
        for _ in range(n_attentions):
            yield from ((_D_MODEL, _D_MODEL),) * 4
            yield from _layer_norm()
        yield from _linear(_D_MODEL, _D_FF)
        yield from _linear(_D_FF, _D_MODEL)
        yield from _layer_norm()


def _layer_norm() -> Iterator[Shape]:
    yield from ((_D_MODEL,), (_D_MODEL,))


def _linear(n_in: int, n_out: int) -> Iterator[Shape]:
    yield from ((n_out, n_in), (n_out,))


#: Name -> generator of shapes.
GRADIENT_SETS: dict[str, Callable[[], Iterator[Shape]]] = {
    "resnet50": _resnet50,
    "transformer-base": _transformer_base,
    "vgg16": _vgg16,
}
