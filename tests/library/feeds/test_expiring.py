"""ExpiringMap: entries expire, and limits evict the oldest."""

from kaveri.feeds.expiring import ExpiringMap


def test_a_value_lives_for_a_while_after_it_was_last_put() -> None:
    values: ExpiringMap[str, int] = ExpiringMap(60.0)
    values.put("a", 1, 100.0)
    assert values.get("a", 159.0) == 1
    assert values.get("a", 160.0) is None
    values.put("a", 2, 150.0)
    assert values.get("a", 160.0) == 2
    assert values.get("b", 160.0) is None


def test_the_oldest_are_evicted_when_there_are_too_many() -> None:
    values: ExpiringMap[str, int] = ExpiringMap(60.0, max_count=2)
    for key in ("a", "b", "a", "c"):
        values.put(key, 1, 100.0)
    assert list(values.keys()) == ["a", "c"]


def test_the_oldest_are_evicted_when_they_are_too_large_together() -> None:
    values: ExpiringMap[str, int] = ExpiringMap(60.0, max_bytes=10)
    values.put("a", 1, 100.0, 6)
    values.put("b", 2, 100.0, 4)
    values.put("c", 3, 100.0, 6)
    assert list(values.keys()) == ["b", "c"]
    values.put("d", 4, 100.0, 11)
    assert list(values.keys()) == ["b", "c"]
    assert values.pop("b") == 2
    values.put("e", 5, 100.0, 4)
    assert list(values.keys()) == ["c", "e"]


def test_expired_values_take_no_memory_once_another_is_put() -> None:
    values: ExpiringMap[str, int] = ExpiringMap(60.0)
    values.put("a", 1, 100.0)
    values.put("b", 2, 160.0)
    assert list(values.values()) == [2]


def test_nothing_is_kept_for_no_time() -> None:
    values: ExpiringMap[str, int] = ExpiringMap(0.0)
    values.put("a", 1, 100.0)
    assert len(values) == 0
