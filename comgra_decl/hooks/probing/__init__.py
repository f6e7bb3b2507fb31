"""Pass the same samples through a clean copy of the model at recorded steps."""
