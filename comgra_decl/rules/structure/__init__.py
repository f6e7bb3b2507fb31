"""Rules about how the network is put together."""
