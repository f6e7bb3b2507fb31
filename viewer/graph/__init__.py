"""Folding and layout of the recorded graph; plain Python, no Panel."""
