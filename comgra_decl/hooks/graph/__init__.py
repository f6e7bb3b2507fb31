"""The dependency graph of a step: what each tensor was computed from."""
