"""Presets of the Hydra group `comgra`."""
