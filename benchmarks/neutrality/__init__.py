"""Train a zoo of architectures with and without tracing, and compare the results bit by bit.

`python -m benchmarks.neutrality` runs all of it; `zoo/` holds the programs.
"""
