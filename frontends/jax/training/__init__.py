"""A training step: differentiation, gradients in, updates out."""
