"""The network of Krizhevsky, Sutskever and Hinton (NIPS 2012), in one column."""

import chainer
from chainer import functions as F
from chainer import links as L


class AlexNet(chainer.Chain):
    """Five convolutions and three fully connected layers.

    Most of its 61 million parameters are in two layers: uneven buckets for whatever
    averages the gradients.

    Args:
        n_classes: outputs.
        width: factor on the number of channels and units.
    """

    def __init__(self, n_classes=1000, width=1.0):
        super().__init__()
        n64, n192, n256, n384, n4096 = (
            max(int(n * width), 1) for n in (64, 192, 256, 384, 4096)
        )
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, n64, 11, 4, 2)
            self.conv2 = L.Convolution2D(n64, n192, 5, pad=2)
            self.conv3 = L.Convolution2D(n192, n384, 3, pad=1)
            self.conv4 = L.Convolution2D(n384, n256, 3, pad=1)
            self.conv5 = L.Convolution2D(n256, n256, 3, pad=1)
            self.fc6 = L.Linear(None, n4096)
            self.fc7 = L.Linear(n4096, n4096)
            self.fc8 = L.Linear(n4096, n_classes)

    def forward(self, x):
        h = _pool(F.local_response_normalization(F.relu(self.conv1(x))))
        h = _pool(F.local_response_normalization(F.relu(self.conv2(h))))
        h = F.relu(self.conv4(F.relu(self.conv3(h))))
        h = _pool(F.relu(self.conv5(h)))
        h = F.dropout(F.relu(self.fc6(h)))
        h = F.dropout(F.relu(self.fc7(h)))
        return self.fc8(h)


def _pool(h):
    return F.max_pooling_2d(h, 3, 2)
