"""Storage: everything that knows a filesystem. Lists, opens, repeats, copies; one module imports fsspec.

- ``io``: Opens files by name, with fsspec.
- ``glob``: Expands patterns to the names of files.
- ``retry``: Repeats requests that failed for a moment.
- ``file_cache``: Copies of remote files in a local folder, for all processes of a host.
"""
