"""Metrics and notes logged by the program, and the numbers of every step, recorded or not."""
