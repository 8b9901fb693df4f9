"""Batches: flat leaves and a nesting, what they are like, and values for several replicas.

- ``containers``: Dicts, lists, tuples, dataclasses: opens and rebuilds one level of nesting.
- ``pytree``: A batch as a flat list of leaves and one nesting; counts its samples, and cuts it.
- ``schema``: The nesting, names and dtypes that all batches have; makes empty batches.
- ``collated``: The structure of batches that are made of samples here, from answers for one sample and for two.
- ``schema_check``: Keeps the structure of the elements, and checks that of later ones.
- ``element_spec``: The spec of the elements, and how many bytes they take.
- ``padding``: Pads pieces to one size, with a mask.
- ``per_replica``: ``PerReplica``, ``ReduceOp``.
"""
