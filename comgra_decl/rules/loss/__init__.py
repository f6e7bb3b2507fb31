"""Rules about the loss and other metrics."""
