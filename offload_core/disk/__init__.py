"""Files on disks: checks of their folders, and scratch space without a name, read and written past the page cache."""
