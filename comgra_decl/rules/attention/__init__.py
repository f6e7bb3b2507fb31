"""Rules about attention weights."""
