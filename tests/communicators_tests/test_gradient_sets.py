"""The sets of shapes have the published numbers of parameters."""

import math

import pytest

from communicators.gradient_sets import GRADIENT_SETS, shapes_of

# Arrays and elements. ResNet-50 and VGG-16: the counts that Keras and torchvision
# publish for their models with 1000 classes.
COUNTS = {
    "resnet50": (161, 25_557_032),
    "vgg16": (32, 138_357_544),
    "transformer-base": (181, 63_045_632),
}


@pytest.mark.parametrize("name", GRADIENT_SETS)
def test_sets_have_the_published_counts(name):
    shapes = shapes_of(name)
    assert (len(shapes), sum(map(math.prod, shapes))) == COUNTS[name]


def test_the_transformer_has_about_the_number_in_its_paper():
    # Table 3 of arXiv 1706.03762 says 65 million, which it does not break down.
    assert sum(map(math.prod, shapes_of("transformer-base"))) == pytest.approx(
        65e6, rel=0.035
    )


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("resnet50", (64, 3, 7, 7), (1000, 2048)),
        ("vgg16", (64, 3, 3, 3), (1000, 4096)),
        ("transformer-base", (37000, 512), (512,)),
    ],
)
def test_shapes_are_in_forward_order(name, first, last):
    shapes = shapes_of(name)
    assert shapes[0] == first
    assert shapes[-2] == last


def test_an_unknown_set_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'resnet'.*resnet50, transformer-base, vgg"):
        shapes_of("resnet")
