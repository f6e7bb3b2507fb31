"""View models: plain dataclasses computed from a run, without Panel or a browser."""
