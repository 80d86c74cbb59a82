"""Where tensors live and how bytes cross to the host. Seam: device."""
