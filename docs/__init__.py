"""Pages generated from code and measurements, and their generators."""
