"""Measure the cost of tracing on a device: `python -m benchmarks --device cuda`.

Requires only torch and the tracer's own imports. The viewer's packages are not needed, and the
store's are optional. With `--device cpu --smoke`, the same code measures tiny nets on the CPU, so
that only CUDA itself remains to be tested on a machine that has it.
"""
