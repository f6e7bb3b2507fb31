"""Pictures that need only recorded arrays: numpy in, numpy out."""
