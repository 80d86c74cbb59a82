"""Torch without public names: its internals, its autograd engine and its compiler."""
