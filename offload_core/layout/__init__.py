"""Which element of which parameter lies where: pure integers."""
