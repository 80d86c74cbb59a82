"""Settings: ``OffloadConfig``, and DeepSpeed's configuration read into it."""
