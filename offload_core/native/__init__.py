"""The compiled kernels, and the one module that calls them."""
