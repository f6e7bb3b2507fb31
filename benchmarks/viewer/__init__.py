"""Measure the speed of the viewer in a real browser: `python -m benchmarks.viewer`."""
