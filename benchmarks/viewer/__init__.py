"""How fast the viewer is, in a real browser: `python -m benchmarks.viewer`."""
