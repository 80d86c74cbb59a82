"""Starts contenders, measures them in turn and records the results."""
