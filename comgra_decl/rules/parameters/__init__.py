"""Rules about parameters and their updates."""
