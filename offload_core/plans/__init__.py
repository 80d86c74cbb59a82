"""The memory that training takes, and the time of a step: the rules that allocate, and the plans made by them."""
