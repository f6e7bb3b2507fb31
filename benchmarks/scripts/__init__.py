"""Run unmodified public training scripts without and with tracing, and judge the records.

`python -m benchmarks.scripts` runs all of them; `catalogue.yaml` lists them.
"""
