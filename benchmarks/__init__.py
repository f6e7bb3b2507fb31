"""Measure the cost of tracing, compared with no tracing and with comgra 0.11.5.

`python -m benchmarks` runs every tool on every net in short interleaved blocks within one process
and writes a table and its raw figures to `benchmarks/results/`. To add a net, write a function in
`nets.py`; to add a tool, a class in `tools/`.
"""
