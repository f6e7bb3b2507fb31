"""Programs with and without bugs, written by an author who knew none of the rules; see README."""
