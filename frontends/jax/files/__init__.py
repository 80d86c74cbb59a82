"""Checkpoints, exports and states as pytrees."""
