"""The ways to start a traced program."""
