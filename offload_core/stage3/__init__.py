"""Partitioned parameters, which are gathered for their use."""
