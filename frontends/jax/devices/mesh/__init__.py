"""Ranks that are places on a mesh axis."""
