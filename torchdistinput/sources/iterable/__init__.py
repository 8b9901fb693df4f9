"""Iterables, loaders over them, and what a dataset function returned."""
