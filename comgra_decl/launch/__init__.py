"""The ways to start a traced program, and the command line."""
