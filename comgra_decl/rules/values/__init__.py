"""Rules about values in the forward pass."""
