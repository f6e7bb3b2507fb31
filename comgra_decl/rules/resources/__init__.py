"""Rules about the memory, time and input of the program around the network."""
