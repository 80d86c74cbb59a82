"""Settings: ``OffloadConfig``, the formats of states, and the protocol of schedules."""
