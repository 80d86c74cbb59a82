"""DeepSpeed's configuration: its keys, its schedules, and its translation to fields of ``OffloadConfig``."""
