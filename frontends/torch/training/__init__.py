"""Gradients in, updates out: the parameters that have states, the states themselves, and memory that is given back."""
