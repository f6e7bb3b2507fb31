"""Rules about how the network is built."""
