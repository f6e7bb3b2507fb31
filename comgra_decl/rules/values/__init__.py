"""Rules about values of the forward pass."""
