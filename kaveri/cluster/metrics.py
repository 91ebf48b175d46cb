"""Prometheus metrics of a process's cluster membership, for every service."""

from prometheus_client import Counter

REFUSED_HEARTBEATS = Counter(
    "kaveri_refused_heartbeats", "Heartbeats that the store refused to take although it could be reached."
)
