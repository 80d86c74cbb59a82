"""Stores of a shard's states: their memory and their format. Seam: store."""
