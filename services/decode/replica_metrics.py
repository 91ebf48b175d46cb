"""The Prometheus metrics of replicas: copies held here, copies of the requests here, and resumes."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestNotFound
from kaveri.kv.replicas.store import ReplicaStore

_RESUME_OUTCOMES = {RequestNotFound: "not_found", NoCapacity: "no_room", InvalidArgument: "invalid"}


class ReplicaMetrics:
    """One set per process; tests that host several instances give each a registry of its own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.held = Gauge(
            "kaveri_replicas_held", "Copies of other instances' requests that this one holds.", registry=registry
        )
        self.bytes = Gauge(
            "kaveri_replica_bytes", "Host memory for copies, by state: used or free.", ["state"], registry=registry
        )
        self.owned = Gauge(
            "kaveri_replicas_owned", "Requests here of which another instance holds a copy.", registry=registry
        )
        self.unprotected = Gauge(
            "kaveri_unprotected_requests",
            "Requests here that are worth a copy, and of which no whole block is copied yet.",
            registry=registry,
        )
        self.lag_tokens = Gauge(
            "kaveri_replica_lag_tokens",
            "Most tokens of one request here whose copy lacks them.",
            registry=registry,
        )
        self.copied_tokens = Counter(
            "kaveri_replica_copied_tokens",
            "Tokens of requests here whose KV has been copied to holders; again, where a holder was replaced.",
            registry=registry,
        )
        self.opens = Counter(
            "kaveri_replica_opens",
            "Copies of requests here that a holder was asked for, by outcome: granted, refused or failed.",
            ["outcome"],
            registry=registry,
        )
        self.losses = Counter(
            "kaveri_replica_losses", "Copies of requests here that ended before their requests.", registry=registry
        )
        self.moves = Counter(
            "kaveri_replica_moves",
            "Requests that this instance has let go while it drained, with all their KV at the holder.",
            registry=registry,
        )
        self.drops = Counter(
            "kaveri_replica_drops",
            "Copies dropped here, by cause: given_up, closed, resumed, replaced, full, orphaned, unused, "
            "deadline or draining.",
            ["cause"],
            registry=registry,
        )
        self.resumes = Counter(
            "kaveri_resumes",
            "Calls of Resume, by outcome: resumed, not_found, no_room, invalid or refused.",
            ["outcome"],
            registry=registry,
        )
        self.resumed_tokens = Counter(
            "kaveri_resumed_tokens",
            "Tokens of resumed requests, by the source of their KV: held or computed.",
            ["source"],
            registry=registry,
        )
        # There from the start: Prometheus does not count what a series begins with.
        for outcome in ("granted", "refused", "failed"):
            self.opens.labels(outcome)
        for source in ("held", "computed"):
            self.resumed_tokens.labels(source)

    def watch(self, store: ReplicaStore) -> None:
        """Shows the store's usage, read when scraped."""
        self.held.set_function(lambda: store.usage().replica_count)
        self.bytes.labels("used").set_function(lambda: store.usage().used_bytes)
        self.bytes.labels("free").set_function(lambda: store.usage().total_bytes - store.usage().used_bytes)

    def count_resume(self, error: KaveriError) -> None:
        """A Resume was refused."""
        self.resumes.labels(_RESUME_OUTCOMES.get(type(error), "refused")).inc()

    def count_resumed(self, held_tokens: int, recomputed_tokens: int) -> None:
        """A request goes on here."""
        self.resumes.labels("resumed").inc()
        self.resumed_tokens.labels("held").inc(held_tokens)
        self.resumed_tokens.labels("computed").inc(recomputed_tokens)
