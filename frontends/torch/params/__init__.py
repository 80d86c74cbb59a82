"""For each tensor: the elements that this process owns, their memory, and whether the tensor may be read now."""
