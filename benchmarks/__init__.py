"""What tracing costs, measured against nothing attached and against comgra 0.11.5.

One command, `python -m benchmarks`, runs every tool on every net in short interleaved blocks within
one process and writes a table and its raw figures to `benchmarks/results/`. A new net is one
function in `nets.py`, a new tool one class in `tools/`.
"""
