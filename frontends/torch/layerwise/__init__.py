"""``engine.accumulate()``: all micro-batches of an update pass block after block of a model."""
