"""Networks for images of 1000 classes; each takes float32 images (N, 3, H, W)."""

from models.alexnet import AlexNet
from models.googlenet import GoogLeNet
from models.nin import NIN
from models.resnet import resnet50, resnet101, resnet152

#: Name on the command line -> function or class that makes the network from the number
#: of classes and a factor on the number of channels.
MODELS = {
    "alexnet": AlexNet,
    "googlenet": GoogLeNet,
    "nin": NIN,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnet152": resnet152,
}
