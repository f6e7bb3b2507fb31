"""What a run stores when its program fails: where, with which tensors, and what the error means."""
