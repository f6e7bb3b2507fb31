"""Rules about the structure of the model and the calls of losses."""
