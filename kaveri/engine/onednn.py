"""Bounds the cache of generated code of oneDNN, which multiplies matrices for torch on CPUs."""

import os

_CAPACITY = 64
"""Kernels to cache, up to 1 MiB each: decode steps of 16 batch sizes, for a model with four matrix shapes. With 32,
steps whose batch grows and shrinks by one took as long as with 1,024."""


def limit_primitive_cache() -> None:
    """Bound oneDNN's kernel cache; call before the first matrix product. oneDNN caches a kernel per number of rows,
    1,024 unless ONEDNN_PRIMITIVE_CACHE_CAPACITY is set: chunks of a hundred lengths took 250 MiB, and gained nothing.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_CAPACITY))
