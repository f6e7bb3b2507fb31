"""Experiments on a script that do not train it: plans, fitting one batch, mixed samples."""
