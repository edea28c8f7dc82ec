"""What ``python -m chainermn_ng`` is made of."""

from chainermn_ng.launcher.main import main

__all__ = ["main"]
