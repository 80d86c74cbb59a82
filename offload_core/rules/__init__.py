"""The update rules: what a step does to a shard's states. Seam: rule."""
