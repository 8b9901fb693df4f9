"""The walk of a step: fetch, transfer, coordinate, buffer."""
