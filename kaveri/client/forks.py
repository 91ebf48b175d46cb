"""Refuses to use gRPC in a process that was forked after gRPC was in use: a call there would never end."""

import os

_connected_in: set[int] = set()
"""Ids of the processes in which a client has connected: this one and its ancestors by fork."""


def note_connected() -> None:
    """Records that gRPC is in use in this process."""
    _connected_in.add(os.getpid())


def is_forked() -> bool:
    """Whether this process was forked after a client had connected."""
    return not _connected_in <= {os.getpid()}


def check_not_forked() -> None:
    """Raises RuntimeError in a process that was forked after a client had connected."""
    if is_forked():
        raise RuntimeError(
            "this process was forked after a Kaveri client had connected, and gRPC does not work here: fork before the "
            "first call, or use multiprocessing's 'spawn'"
        )
