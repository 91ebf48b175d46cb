"""Prometheus metrics of replicas: copies held here, copies of local requests, and resumptions."""

from dataclasses import dataclass
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestNotFound
from kaveri.kv.replicas.store import ReplicaStore

_RESUME_OUTCOMES = {RequestNotFound: "not_found", NoCapacity: "no_room", InvalidArgument: "invalid"}


@dataclass(frozen=True, slots=True)
class CopyGauges:
    """Gauges of KV copies that other instances hold of this instance's requests."""

    owned: Gauge
    unprotected: Gauge
    lag_tokens: Gauge


class ReplicaMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.held = gauge("kaveri_replicas_held", "Copies of other instances' requests that this one holds.")
        self.bytes = gauge("kaveri_replica_bytes", "Host memory for copies, by state: used or free.", ["state"])
        self.copies = CopyGauges(
            gauge("kaveri_replicas_owned", "Requests here of which another instance holds a copy."),
            gauge(
                "kaveri_unprotected_requests",
                "Requests here that are worth a copy, and of which no whole block is copied yet.",
            ),
            gauge("kaveri_replica_lag_tokens", "Most tokens of one request here whose copy lacks them."),
        )
        self.copied_tokens = counter(
            "kaveri_replica_copied_tokens",
            "Tokens of requests here whose KV has been copied to holders; again, where a holder was replaced.",
        )
        self.opens = counter(
            "kaveri_replica_opens",
            "Copies of requests here that a holder was asked for, by outcome: granted, refused or failed.",
            ["outcome"],
        )
        self.losses = counter("kaveri_replica_losses", "Copies of requests here that ended before their requests.")
        self.moves = counter(
            "kaveri_replica_moves",
            "Requests that this instance has let go while it drained, with all their KV at the holder.",
        )
        self.drops = counter(
            "kaveri_replica_drops",
            "Copies dropped here, by cause: given_up, closed, resumed, replaced, full, orphaned, unused, "
            "deadline or draining.",
            ["cause"],
        )
        self.resumes = counter(
            "kaveri_resumes",
            "Calls of Resume, by outcome: resumed, not_found, no_room, invalid or refused.",
            ["outcome"],
        )
        self.resumed_tokens = counter(
            "kaveri_resumed_tokens",
            "Tokens of resumed requests, by the source of their KV: held or computed.",
            ["source"],
        )
        # Create all series now: Prometheus ignores the first sample of a series in rates.
        for outcome in ("granted", "refused", "failed"):
            self.opens.labels(outcome)
        for source in ("held", "computed"):
            self.resumed_tokens.labels(source)

    def watch(self, store: ReplicaStore) -> None:
        self.held.set_function(lambda: store.usage().replica_count)
        self.bytes.labels("used").set_function(lambda: store.usage().used_bytes)
        self.bytes.labels("free").set_function(lambda: store.usage().total_bytes - store.usage().used_bytes)

    def count_resume(self, error: KaveriError) -> None:
        self.resumes.labels(_RESUME_OUTCOMES.get(type(error), "refused")).inc()

    def count_resumed(self, held_tokens: int, recomputed_tokens: int) -> None:
        self.resumes.labels("resumed").inc()
        self.resumed_tokens.labels("held").inc(held_tokens)
        self.resumed_tokens.labels("computed").inc(recomputed_tokens)
