"""Checkpoints and exports of a model."""
