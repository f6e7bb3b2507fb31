"""Read the ranks of a distributed run as one run."""
