"""A run folder is data, whoever made it: nothing in it runs, hangs, exhausts memory or misleads."""
