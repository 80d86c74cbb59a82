"""JAX's devices and processes: how arrays cross to the host and back, and the context of a user's call."""
