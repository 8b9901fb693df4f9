"""What a batch is: its nesting and leaves, its schema, and the values of several replicas.

- ``containers``: Dicts, lists, tuples, dataclasses: one level taken apart and put together again.
- ``pytree``: Nested batches: what is a leaf, how many samples there are, how they are cut.
- ``schema``: Nesting, names and dtypes that all batches have; how an empty one is made.
- ``schema_check``: The schema of the elements, learned once and checked; a batch of it is recognised.
- ``element_spec``: What is known of the elements: their spec, their bytes.
- ``padding``: Pieces of one size with a mask, if asked for.
- ``per_replica``: ``PerReplica``, ``ReduceOp``.
"""
