"""Pytrees: their leaves, the leaves' names, and the cut of a leaf over ranks."""
