"""Experiments on a training script: plans, fitting one batch, batch mixing, layer statistics."""
