"""A training step: gradients in, updated parameters out."""
