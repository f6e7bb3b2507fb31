"""A run of several processes, whose ranks are read as if they were one."""
