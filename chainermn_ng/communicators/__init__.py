"""Communicators for Chainer models, made by name."""

from chainermn_ng.communicators.chainer_communicator import ChainerCommunicator
from chainermn_ng.communicators.factory import create_communicator, engine_of

#: ChainerMN's name for the class of all communicators.
CommunicatorBase = ChainerCommunicator

__all__ = [
    "ChainerCommunicator",
    "CommunicatorBase",
    "create_communicator",
    "engine_of",
]
