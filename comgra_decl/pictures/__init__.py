"""Pictures that need nothing but recorded arrays: numpy in, numpy out."""
