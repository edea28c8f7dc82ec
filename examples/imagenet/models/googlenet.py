"""Szegedy et al., "Going Deeper with Convolutions" (arXiv 1409.4842).

With batch normalization after each convolution, as in arXiv 1502.03167, which makes
the auxiliary classifiers unnecessary.
"""

import chainer
from chainer import functions as F
from chainer import links as L

# Table 1 of the paper: outputs of the 1x1, 3x3 and 5x5 branches and of the one with
# pooling, with the reductions before the second and third. None: pool between stages.
_INCEPTIONS = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def _conv(n_out, ksize, stride=1, pad=0):
    he = chainer.initializers.HeNormal()
    conv = L.Convolution2D(None, n_out, ksize, stride, pad, nobias=True, initialW=he)
    return chainer.Sequential(conv, L.BatchNormalization(n_out), F.relu)


def _pool(h):
    return F.max_pooling_2d(h, 3, 2)


class Inception(chainer.Chain):
    """Four branches side by side, joined along the channels."""

    def __init__(self, n1, reduce3, n3, reduce5, n5, n_pool):
        super().__init__()
        with self.init_scope():
            self.branch1 = _conv(n1, 1)
            self.branch3 = chainer.Sequential(_conv(reduce3, 1), _conv(n3, 3, pad=1))
            self.branch5 = chainer.Sequential(_conv(reduce5, 1), _conv(n5, 5, pad=2))
            self.branch_pool = _conv(n_pool, 1)

    def forward(self, x):
        pooled = self.branch_pool(F.max_pooling_2d(x, 3, 1, 1))
        return F.concat(
            (self.branch1(x), self.branch3(x), self.branch5(x), pooled), axis=1
        )


class GoogLeNet(chainer.Chain):
    """A stem of three convolutions and nine inception modules.

    Args:
        n_classes: outputs.
        width: factor on the number of channels.
    """

    def __init__(self, n_classes=1000, width=1.0):
        super().__init__()

        def scaled(*numbers):
            return [max(int(n * width), 1) for n in numbers]

        n64, n192 = scaled(64, 192)
        layers = [
            Inception(*scaled(*numbers)) if numbers else _pool
            for numbers in _INCEPTIONS
        ]
        with self.init_scope():
            self.stem = chainer.Sequential(
                _conv(n64, 7, 2, 3), _pool, _conv(n64, 1), _conv(n192, 3, pad=1), _pool
            )
            self.inceptions = chainer.Sequential(*layers)
            self.fc = L.Linear(None, n_classes)

    def forward(self, x):
        h = F.mean(self.inceptions(self.stem(x)), axis=(2, 3))
        return self.fc(F.dropout(h, 0.4))
