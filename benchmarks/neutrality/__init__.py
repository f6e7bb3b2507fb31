"""Trains a zoo of architectures with and without tracing and compares every bit of the outcome.

`python -m benchmarks.neutrality` runs all of it; `zoo/` holds the programs.
"""
