"""The source of data in files and other fragments: from records to rows, and its saved position.

- ``source``: The source for such a dataset; resumes, also in another world.
- ``record_rows``: Divides the decoding among ranks and loader workers, and cuts batches.
- ``position``: The saved position of all workers.
"""
