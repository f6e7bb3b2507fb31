"""Runs public training scripts, unedited, without and with tracing, and judges the records.

`python -m benchmarks.scripts` runs all of them; `catalogue.yaml` lists them.
"""
