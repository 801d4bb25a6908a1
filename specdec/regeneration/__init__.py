"""The target writes the answers of a data set anew."""
