"""Stage 3: parameters in shards, which are gathered for the modules that use them."""
