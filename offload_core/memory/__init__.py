"""Host memory, the plan of what is needed, and the report of what is held."""
