"""Parameters that exist as shards and are made whole for their use."""
