"""Connections to other libraries: to their training loops, in modules that import the library that they are named for;
and to DeepSpeed's files (``zero_files``), which take no library."""
