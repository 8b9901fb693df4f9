"""The engine: a step is fetched, sent to its devices, agreed on by all ranks, and kept until the loop takes it."""
