"""Rules about activation functions and the size of activations."""
