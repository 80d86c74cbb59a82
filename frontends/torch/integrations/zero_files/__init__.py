"""DeepSpeed's checkpoints: read without running code from them, loaded, and written for DeepSpeed."""
