"""A plugin of JAX for processes whose CPU devices are to be taken for devices that are not host memory."""

import sys


def initialize() -> None:
    """JAX calls it before it looks for devices. Tests have stand-ins of their own."""
    if "pytest" in sys.modules:
        return
    from frontends.jax.placement import placement

    placement.on_cpu = lambda array: False
