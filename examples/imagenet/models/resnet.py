"""Residual networks of 50, 101 and 152 layers.

He et al., "Deep Residual Learning for Image Recognition" (arXiv 1512.03385), with two
habits of Goyal et al. (arXiv 1706.02677, section 5.1): a block's stride is in its 3x3
convolution, and the last batch normalization of each block starts with a scale of
zero, so that a block is the identity at first.
"""

import chainer
from chainer import functions as F
from chainer import links as L


class ConvBN(chainer.Chain):
    """A convolution without bias, and batch normalization."""

    def __init__(self, n_in, n_out, ksize, stride=1, pad=0, initial_scale=1):
        super().__init__()
        he = chainer.initializers.HeNormal(fan_option="fan_out")
        with self.init_scope():
            self.conv = L.Convolution2D(
                n_in, n_out, ksize, stride, pad, nobias=True, initialW=he
            )
            self.bn = L.BatchNormalization(n_out, initial_gamma=initial_scale)

    def forward(self, x):
        return self.bn(self.conv(x))


class Bottleneck(chainer.Chain):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; four times ``n_mid`` out."""

    def __init__(self, n_in, n_mid, stride):
        super().__init__()
        n_out = 4 * n_mid
        with self.init_scope():
            self.reduce = ConvBN(n_in, n_mid, 1)
            self.conv = ConvBN(n_mid, n_mid, 3, stride, 1)
            self.expand = ConvBN(n_mid, n_out, 1, initial_scale=0)
            if stride > 1 or n_in != n_out:
                self.shortcut = ConvBN(n_in, n_out, 1, stride)

    def forward(self, x):
        h = self.expand(F.relu(self.conv(F.relu(self.reduce(x)))))
        return F.relu(h + (self.shortcut(x) if hasattr(self, "shortcut") else x))


class ResNet(chainer.Chain):
    """A residual network of four stages.

    Args:
        n_blocks: blocks in each stage.
        n_classes: outputs.
        width: factor on the number of channels, of which there are 64 at the start.
    """

    def __init__(self, n_blocks, n_classes=1000, width=1.0):
        super().__init__()
        n_mid = max(int(64 * width), 1)
        stages, n_in = [], n_mid
        for stage, n in enumerate(n_blocks):
            for block in range(n):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Bottleneck(n_in, n_mid * 2**stage, stride))
                n_in = 4 * n_mid * 2**stage
        with self.init_scope():
            self.stem = ConvBN(3, n_mid, 7, 2, 3)
            self.stages = chainer.Sequential(*stages)
            self.fc = L.Linear(
                n_in, n_classes, initialW=chainer.initializers.Normal(0.01)
            )

    def forward(self, x):
        h = F.max_pooling_2d(F.relu(self.stem(x)), 3, 2, 1, cover_all=False)
        return self.fc(F.mean(self.stages(h), axis=(2, 3)))


def resnet50(n_classes=1000, width=1.0):
    """Return the network of 50 layers; 25.6 million parameters at width 1."""
    return ResNet((3, 4, 6, 3), n_classes, width)


def resnet101(n_classes=1000, width=1.0):
    """Return the network of 101 layers."""
    return ResNet((3, 4, 23, 3), n_classes, width)


def resnet152(n_classes=1000, width=1.0):
    """Return the network of 152 layers."""
    return ResNet((3, 8, 36, 3), n_classes, width)
