"""Rules about the loss and other numbers of each step."""
