"""The stages that a step goes through, in this order: fetch, pad (if asked for), transfer, coordinate, buffer."""
