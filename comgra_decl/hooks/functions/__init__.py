"""Recording of function calls and of tensors that the program names, in addition to modules."""
