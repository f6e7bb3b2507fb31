"""Metrics and notes logged by the program, and the losses in every step, recorded or not."""
