"""A device and ranks made of threads, for tests and simulations."""
