"""Data with an index: a torch ``DataLoader`` over a map-style dataset, tensors and arrays in memory, samplers."""
