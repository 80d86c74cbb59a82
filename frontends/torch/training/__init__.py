"""Gradients in, updates out: the parameters that have states, the states themselves, and the device memory that
``release()`` frees."""
