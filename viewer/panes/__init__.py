"""One module per view of the selected tensor or run."""
