"""Pytrees: their leaves, names, and how a leaf is cut."""
