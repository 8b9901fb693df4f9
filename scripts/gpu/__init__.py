"""The parts of ``scripts/test_gpu``: each is a module with a function ``run(small) -> Figures``.

- ``accelerator``: The device of this machine, real or simulated, and work of a known length on it.
- ``values``: Random steps of a consumer who holds batches, leaves early and changes its stream; torch's sanitizer.
- ``memory``: What the allocator holds after many epochs.
- ``step_time``: A step beside max(copy, compute), and beside the peers; the bare copy.
- ``loader_workers``: Large samples from loader workers.
- ``graphs``: Padded batches under a CUDA graph and under ``torch.compile``.
- ``training``: NCCL with one rank: weights beside those of the CPU.
"""
