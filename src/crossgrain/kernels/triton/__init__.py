"""Triton kernels for GPUs: the bytes of the reference, written and read in one pass.

Nothing here is imported before a tensor on a GPU needs it, because importing Triton takes time, and not everybody has
it. `backend.TritonBackend` is what the rest of crossgrain uses.
"""
