"""Prometheus metrics of KV cache transfers: queued bytes, receivers and flow-control credit. Read when scraped."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kaveri.kv.transfer.flow import KvFlow, PeerFlow

_PEER_LABELS = ("peer", "transport")
_PEER_GAUGES: dict[str, tuple[str, Callable[[PeerFlow], float]]] = {
    "kaveri_kv_push_queued_bytes": (
        "KV bytes that are computed and not written: they wait for credit, for their turn or for the link.",
        lambda peer: peer.queued_bytes,
    ),
    "kaveri_kv_push_unaccepted_bytes": (
        "KV bytes that are written and not accepted.",
        lambda peer: peer.unaccepted_bytes,
    ),
    "kaveri_kv_push_blocks": ("Blocks that open pushes have on the receiver.", lambda peer: peer.block_count),
    "kaveri_kv_push_credit_bytes": (
        "KV bytes that the receiver lets be written now.",
        lambda peer: peer.credit_bytes,
    ),
    "kaveri_kv_push_waiting": (
        "1 while all that is queued for the receiver waits for its credit, else 0.",
        lambda peer: float(peer.is_waiting),
    ),
}


class KvMetrics:
    """Prometheus collector for an engine's KV cache transfers: sent, by receiver, and received."""

    def __init__(self, flow: Callable[[], KvFlow]) -> None:
        self._flow = flow

    def describe(self) -> Iterator[Metric]:
        """Names and labels of the metrics, without reading values."""
        return _families(KvFlow())

    def collect(self) -> Iterator[Metric]:
        """Metrics with current values."""
        return _families(self._flow())


def _families(flow: KvFlow) -> Iterator[Metric]:
    sending, receiving = flow.sending, flow.receiving
    for name, (text, value) in _PEER_GAUGES.items():
        # A receiver restarted at its address is a separate peer, and so is one that takes several block shapes.
        sums: dict[tuple[str, str], float] = {}
        for peer in sending.peers:
            labels = (peer.address, peer.transport)
            sums[labels] = sums.get(labels, 0.0) + value(peer)
        family = GaugeMetricFamily(name, text, labels=_PEER_LABELS)
        for labels, total in sums.items():
            family.add_metric(labels, total)
        yield family
    yield CounterMetricFamily(
        "kaveri_kv_credit_waits",
        "How often all that was queued for a receiver had to wait for its credit.",
        value=sending.credit_waits,
    )
    yield CounterMetricFamily(
        "kaveri_kv_credit_wait_seconds", "For how long, over all receivers.", value=sending.credit_wait_s
    )
    yield GaugeMetricFamily("kaveri_kv_senders", "Connections from senders.", value=receiving.sender_count)
    yield GaugeMetricFamily(
        "kaveri_kv_credit_window_bytes", "What each of them may have under way.", value=receiving.window_bytes
    )
    yield GaugeMetricFamily(
        "kaveri_kv_credit_held_bytes",
        "Credit that is not home: not used, or for bytes that are not taken in yet.",
        value=receiving.held_bytes,
    )
    blocks = GaugeMetricFamily(
        "kaveri_kv_landing_blocks",
        "Blocks of transfers that have not landed: leased, or in quarantine.",
        labels=["state"],
    )
    blocks.add_metric(["leased"], receiving.leased_block_count - receiving.quarantined_block_count)
    blocks.add_metric(["quarantined"], receiving.quarantined_block_count)
    yield blocks
