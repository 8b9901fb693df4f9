"""The oracle: random programs over every kind of data, and what the laws of the design say that each rank must get.

- ``program``: the values: data, options, and turns of actions (read, break, seek, skip) at worlds of any size
- ``laws``: what every replica gets at every step, from the design's text alone; nothing of the library takes part
- ``expected``: the log of a program that each rank must write
- ``data``: the program's data as users give it, and the samples of what comes back
- ``playing``: one rank plays a turn, and writes its log
- ``checking``: compares the two, turn by turn
- ``drawing``: random programs, which shrink
"""
