"""optax's words and states, from and to ours, and an optimizer for optax's loops."""
