"""Scratch files on disks: space without a name, read and written past the page cache."""
