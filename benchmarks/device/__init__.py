"""What tracing costs where a device does the work: `python -m benchmarks --device cuda`.

Nothing is needed but torch and what the tracer itself imports: neither the packages of the viewer
nor, if need be, those of the store. With `--device cpu --smoke` the same code measures tiny nets on
the processor, so that nothing but CUDA itself is left to be tried on a machine that has it.
"""
