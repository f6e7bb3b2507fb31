"""What is recorded beside modules: calls of functions, and tensors that the program names."""
