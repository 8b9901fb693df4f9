"""What one rank measures of itself, step by step, and the trace file in which it writes that down.

Nothing in here runs unless ``InputOptions.trace`` or ``log_every`` asks for it.

- ``read_times``: Where the time of a batch goes, measured in the process that reads it.
- ``epoch_trace``: Puts the times of the stages of one epoch together, step by step.
- ``waits``: What the training loop waited for, and what this rank did while the others waited for it.
- ``trace_file``: The file of this rank, and the thread that writes it.
"""
