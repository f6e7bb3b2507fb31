"""What is tried with a script without training it: plans, one batch, mixed samples."""
