"""Train a zoo of architectures with and without tracing, and compare the results bit by bit.

`python -m benchmarks.neutrality` runs the whole zoo; `zoo/` contains the programs.
"""
