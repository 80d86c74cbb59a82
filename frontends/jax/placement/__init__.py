"""Parameters on the devices, and the computation of gradients there."""
