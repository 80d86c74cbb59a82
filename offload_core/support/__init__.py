"""Small helpers that know nothing of training: checks, units, processors, disks, launchers."""
