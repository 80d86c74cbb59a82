"""What a tensor is: which elements of it this process owns, where they live, whether it may be read now."""
