"""Rules about the structure of the model and calls to loss functions."""
