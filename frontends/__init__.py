"""The framework front ends: ``frontends.torch`` and ``frontends.jax``. Neither imports the other."""
