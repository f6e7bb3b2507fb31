"""Measure the store at scale: `python -m benchmarks.store`."""
