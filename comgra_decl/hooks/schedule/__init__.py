"""Determine when a step begins and ends, which type it has, and whether it is recorded."""
