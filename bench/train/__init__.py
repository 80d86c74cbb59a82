"""The training program: ``python -m bench.train``."""
