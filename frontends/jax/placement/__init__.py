"""How parameters lie on the devices, and how gradients are computed there."""
