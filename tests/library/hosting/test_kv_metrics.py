from prometheus_client import CollectorRegistry

from kaveri.hosting.kv_metrics import KvMetrics
from kaveri.kv.transfer.flow import KvFlow, PeerFlow, ReceiverFlow, SenderFlow


def peer(address: str, queued_bytes: int, *, is_waiting: bool = False) -> PeerFlow:
    return PeerFlow(
        address,
        "tcp",
        push_count=1,
        block_count=4,
        queued_bytes=queued_bytes,
        unaccepted_bytes=30,
        credit_bytes=5,
        is_waiting=is_waiting,
    )


def test_each_receiver_has_its_own_sample_also_after_a_restart_at_its_address() -> None:
    peers = [peer("a:1", 100, is_waiting=True), peer("b:1", 7), peer("a:1", 20)]
    registry = CollectorRegistry()
    registry.register(KvMetrics(lambda: KvFlow(sending=SenderFlow(tuple(peers), 3, 0.5))))

    def value(name: str, address: str) -> object:
        return registry.get_sample_value(f"kaveri_kv_{name}", {"peer": address, "transport": "tcp"})

    assert (value("push_queued_bytes", "a:1"), value("push_queued_bytes", "b:1")) == (120, 7)
    assert (value("push_waiting", "a:1"), value("push_waiting", "b:1")) == (1, 0)
    assert value("push_blocks", "a:1") == 8
    assert value("push_unaccepted_bytes", "b:1") == 30
    assert value("push_credit_bytes", "b:1") == 5
    assert registry.get_sample_value("kaveri_kv_credit_waits_total") == 3
    assert registry.get_sample_value("kaveri_kv_credit_wait_seconds_total") == 0.5
    peers.clear()
    assert value("push_queued_bytes", "a:1") is None


def test_a_receiver_tells_its_credit_and_its_quarantine() -> None:
    flow = ReceiverFlow(
        sender_count=2,
        window_bytes=32,
        held_bytes=50,
        arriving_bytes=10,
        leased_block_count=9,
        quarantined_block_count=4,
    )
    registry = CollectorRegistry()
    registry.register(KvMetrics(lambda: KvFlow(receiving=flow)))
    assert registry.get_sample_value("kaveri_kv_senders") == 2
    assert registry.get_sample_value("kaveri_kv_credit_window_bytes") == 32
    assert registry.get_sample_value("kaveri_kv_credit_held_bytes") == 50
    assert registry.get_sample_value("kaveri_kv_landing_blocks", {"state": "leased"}) == 5
    assert registry.get_sample_value("kaveri_kv_landing_blocks", {"state": "quarantined"}) == 4
