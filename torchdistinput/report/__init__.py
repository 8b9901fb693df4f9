"""What the measurements of all ranks say: the sentence that names who made the others wait, and on what.

- ``verdict``: The sentence, from a few numbers of each rank.
"""
