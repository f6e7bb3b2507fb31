"""Pages that are made from the code and from measurements, and what makes them."""
