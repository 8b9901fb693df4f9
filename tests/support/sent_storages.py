"""How long torch keeps what is attached to the storage of a tensor that was sent to another process."""

from __future__ import annotations

import weakref
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef, shared_cache


def forget_sent_storages() -> None:
    """Lets torch 2.8 let go of the attributes of storages that were sent; later releases have let go of them.

    Torch has weak references to sent storages in a cache, from which the dead ones are removed when there are 128. In
    torch 2.8 an attribute of a storage, such as the memory of a batch, lives for as long as a weak reference to it.
    """
    if _attributes_outlive_storages():
        shared_cache.free_dead_references()  # type: ignore[no-untyped-call] # torch's


@cache
def _attributes_outlive_storages() -> bool:
    class Attribute:
        """What is attached."""

    attribute = Attribute()
    found = weakref.ref(attribute)
    tensor = torch.empty(1)
    tensor.untyped_storage().attribute = attribute  # type: ignore[attr-defined] # torch keeps it with the storage
    weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call] # torch's
    del attribute, tensor
    outlives = found() is not None
    del weak
    return outlives
