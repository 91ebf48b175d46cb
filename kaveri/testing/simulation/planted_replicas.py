"""Planted bugs of copies: see planted.py, which imports this."""

from collections.abc import Iterator

from kaveri.kv.replicas.replicas import Replicas
from kaveri.testing.simulation import planted
from services.decode.holder import ReplicaHolder
from services.decode.replicator import Replicator


@planted._planted
def replica_not_sealed_at_resume() -> Iterator[None]:
    """A holder takes more of the former owner while a request goes on from the copy."""
    with planted._replaced(Replicas, "seal", lambda _: planted._nothing):
        yield


@planted._planted
def old_holder_not_closed() -> Iterator[None]:
    """An owner that has found another holder leaves its copy with the former one."""
    with planted._replaced(Replicator, "_close", lambda _: planted._nothing_async):
        yield


@planted._planted
def orphaned_replicas_kept() -> Iterator[None]:
    """A holder keeps the copies of lost owners that no router resumes."""
    with planted._replaced(ReplicaHolder, "_drop_expired", lambda _: planted._nothing):
        yield
