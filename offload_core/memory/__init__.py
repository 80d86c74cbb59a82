"""Host memory, the plan of memory before a wrap, and the report of memory in use."""
