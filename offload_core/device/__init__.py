"""The memory of tensors, and copies between it and the host. Seam: device."""
