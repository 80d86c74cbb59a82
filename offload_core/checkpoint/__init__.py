"""Checkpoints and exports: written by all processes, read by any other number of them."""
