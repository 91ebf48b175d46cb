"""Planted bugs of copies: see planted.py."""

from collections.abc import Iterator

from kaveri.kv.replicas.replicas import Replicas
from kaveri.testing.simulation.planting import nothing, nothing_async, planted, replaced
from services.decode.holder import ReplicaHolder
from services.decode.replicator import Replicator


@planted
def replica_not_sealed_at_resume() -> Iterator[None]:
    """A holder takes more of the former owner while a request goes on from the copy."""
    with replaced(Replicas, "seal", lambda _: nothing):
        yield


@planted
def old_holder_not_closed() -> Iterator[None]:
    """An owner that has found another holder leaves its copy with the former one."""
    with replaced(Replicator, "_close", lambda _: nothing_async):
        yield


@planted
def orphaned_replicas_kept() -> Iterator[None]:
    """A holder keeps the copies of lost owners that no router resumes."""
    with replaced(ReplicaHolder, "_drop_expired", lambda _: nothing):
        yield
