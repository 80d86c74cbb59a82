"""Messages between processes, and the checks that they agree. Seam: ranks."""
