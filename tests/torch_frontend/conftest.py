"""The devices on which the laws of the torch front end hold."""

from tests.support.places import device

__all__ = ["device"]
