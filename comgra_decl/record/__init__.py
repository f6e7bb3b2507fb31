"""One traced execution: where it is stored, what is known of it, what watches over it."""
