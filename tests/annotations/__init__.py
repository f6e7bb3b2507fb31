"""What a program says about itself."""
