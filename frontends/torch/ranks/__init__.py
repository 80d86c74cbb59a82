"""Process groups and the devices of their ranks."""
