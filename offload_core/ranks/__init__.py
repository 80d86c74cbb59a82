"""What processes tell each other, and whether they agree. Seam: ranks."""
