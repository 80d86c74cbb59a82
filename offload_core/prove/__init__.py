"""One small training in many ways, which all have the same bits (``python -m offload_core prove``)."""
