"""Bounds the cache of generated code of oneDNN, which multiplies matrices for torch on CPUs."""

import os

_CAPACITY = 64
"""Primitives of decode steps: 16 batch sizes of a model with four shapes of matrices; one holds up to a MiB. With 32,
steps whose batch grows and shrinks by one took as long as with 1,024."""


def limit_primitive_cache() -> None:
    """Bound oneDNN's cache; call before the first product. It keeps code for each number of rows, 1,024 of them unless
    ONEDNN_PRIMITIVE_CACHE_CAPACITY says otherwise: chunks of a hundred lengths took 250 MiB, and gained nothing."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_CAPACITY))
