"""Lin, Chen and Yan, "Network In Network" (arXiv 1312.4400)."""

import chainer
from chainer import functions as F
from chainer import links as L


class Stage(chainer.Chain):
    """A convolution, and two of 1x1 that mix its channels pixel by pixel."""

    def __init__(self, n_in, n_out, ksize, stride=1, pad=0):
        super().__init__()
        he = chainer.initializers.HeNormal()
        with self.init_scope():
            self.conv = L.Convolution2D(n_in, n_out, ksize, stride, pad, initialW=he)
            self.mix1 = L.Convolution2D(n_out, n_out, 1, initialW=he)
            self.mix2 = L.Convolution2D(n_out, n_out, 1, initialW=he)

    def forward(self, x):
        return F.relu(self.mix2(F.relu(self.mix1(F.relu(self.conv(x))))))


class NIN(chainer.Chain):
    """Four stages and the mean over pixels; no fully connected layer.

    Args:
        n_classes: outputs.
        width: factor on the number of channels.
    """

    def __init__(self, n_classes=1000, width=1.0):
        super().__init__()
        n96, n256, n384 = (max(int(n * width), 1) for n in (96, 256, 384))
        with self.init_scope():
            self.stage1 = Stage(3, n96, 11, 4)
            self.stage2 = Stage(n96, n256, 5, pad=2)
            self.stage3 = Stage(n256, n384, 3, pad=1)
            self.stage4 = Stage(n384, n_classes, 3, pad=1)

    def forward(self, x):
        h = F.max_pooling_2d(self.stage1(x), 3, 2)
        h = F.max_pooling_2d(self.stage2(h), 3, 2)
        h = F.dropout(F.max_pooling_2d(self.stage3(h), 3, 2))
        return F.mean(self.stage4(h), axis=(2, 3))
