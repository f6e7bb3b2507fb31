"""Rules about numbers that do not fit their format."""
