"""``python -m offload_core``: plan, info, inspect."""
