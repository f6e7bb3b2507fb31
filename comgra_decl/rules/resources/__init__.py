"""Rules about memory, time and input of the program around the network."""
