"""Measure the cost of tracing on a device: `python -m benchmarks --device cuda`.

Requires only torch and the imports of the tracer itself: the packages of the viewer are not needed,
and those of the store are optional. With `--device cpu --smoke`, the same code measures tiny nets
on the CPU, so that only CUDA itself remains to be tested on a machine that has it.
"""
