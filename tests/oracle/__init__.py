"""The oracle: random programs over every kind of data, and what the laws of the design say that each rank must get.

- ``program``: the values: data, options, and turns of actions at worlds of any size, maybe with an odd rank
- ``laws``: what every replica gets at every step, from the design's text alone; nothing of the library takes part
- ``expected``: the log of a program that each rank must write
- ``data``: the program's data as users give it, and the samples of what comes back
- ``playing``: one rank plays a turn, and writes its log
- ``as_torch``: plays a program in one process beside torch's own loader
- ``checking``: compares the two, turn by turn
- ``drawing``: random programs, which shrink
- ``found``: the smallest programs that showed faults
"""
