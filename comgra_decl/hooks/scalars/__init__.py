"""Metrics and notes logged by the program, and the losses of every step, recorded or not."""
