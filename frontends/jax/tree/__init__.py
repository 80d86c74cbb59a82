"""Pytrees: their leaves, the leaves' names and memory kinds, and the cut of a leaf over ranks."""
