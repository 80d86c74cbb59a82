"""Plans of the memory that training takes and of the time of a step, and the rules by which the core allocates."""
