"""Where the states of a process's shards live, and in which format. Seam: store."""
