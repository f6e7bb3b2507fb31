"""When a step begins and ends, what it is called, and whether it is recorded."""
