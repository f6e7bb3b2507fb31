"""What the program says, and the numbers of every step, recorded or not."""
