"""Machines that are not there, and the time on them."""
