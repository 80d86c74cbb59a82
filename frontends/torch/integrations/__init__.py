"""Connections to other libraries' training loops; each module imports the library that it is named for."""
