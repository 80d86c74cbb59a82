"""A model's weights: checkpoints, exports, and weights one by one."""
