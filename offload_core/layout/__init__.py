"""The place of each parameter's elements in buckets, shards and files: pure integers."""
