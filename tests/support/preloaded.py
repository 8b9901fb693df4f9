"""The modules that the fork server of the tests imports beside torch: each rank then has them when it is forked.

A rank collects garbage without a look at any of these modules, as they are frozen. At its exit it does not take the
operators of torch's own libraries apart, which costs more than all else that an empty rank does.
"""

from __future__ import annotations

import gc
import weakref

import pytest  # noqa: F401 - the module of a test imports it

from tests.support import epochs, inputs, launched, platforms, processes, resume, structures  # noqa: F401 - as above

gc.collect()
gc.freeze()
for finalizer in tuple(vars(weakref.finalize)["_registry"]):
    finalizer.atexit = False
