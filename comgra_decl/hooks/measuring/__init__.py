"""Measures the time and memory of modules in the few steps that the spec names."""
