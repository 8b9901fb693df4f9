"""What one rank measures of itself, step by step, why ranks wait, and the trace files.

While a program runs, nothing in here does unless ``InputOptions.trace`` or ``log_every`` asks for it.

- ``read_times``: Where the time of a batch goes, measured in the process that reads it.
- ``epoch_trace``: Puts the times of the stages of one epoch together, step by step.
- ``waits``: What the training loop waited for, and what this rank did while the others waited for it.
- ``verdict``: The sentence, from a few numbers of each rank.
- ``events``: The form of the lines of a trace file.
- ``trace_file``: The file of this rank, and the thread that writes it.
- ``report``: Who made the others wait, and on what, from the files of all ranks.
- ``merge``: The files of all ranks as one, on one clock, with arrows.
"""
