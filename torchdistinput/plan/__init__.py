"""Numbers in, numbers out: the laws."""
