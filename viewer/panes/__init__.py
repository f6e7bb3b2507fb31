"""One module per pane: a view of the selected tensor or of the run."""
