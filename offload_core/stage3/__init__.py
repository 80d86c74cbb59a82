"""Gathers and releases partitioned parameters (stage 3)."""
