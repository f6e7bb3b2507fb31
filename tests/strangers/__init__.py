"""A run folder is untrusted data: nothing in it runs, hangs, exhausts memory or misleads."""
