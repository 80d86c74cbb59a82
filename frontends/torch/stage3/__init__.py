"""Stage 3: parameters in shards, made whole for the modules that use them."""
