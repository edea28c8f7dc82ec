"""What ChainerMN offers for tests of programs that use it."""

from chainermn_ng.testing.device import get_device

__all__ = ["get_device"]
