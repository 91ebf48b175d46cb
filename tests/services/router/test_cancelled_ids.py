"""Which requests were cancelled while no router had them."""

from services.router import cancelled_ids
from services.router.cancelled_ids import CancelledIds


def test_a_cancelled_id_is_remembered_for_a_while_and_for_its_own_secret_only() -> None:
    ids = CancelledIds()
    ids.add("a", "hash", 100.0)
    assert ids.has("a", "hash", 159.0)
    assert not ids.has("a", "hash", 160.0)
    assert not ids.has("a", "other", 101.0)
    assert not ids.has("b", "hash", 101.0)


def test_the_oldest_are_forgotten_when_there_are_too_many(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(cancelled_ids, "_MOST_REMEMBERED", 2)
    ids = CancelledIds()
    for request_id in ("a", "b", "a", "c"):
        ids.add(request_id, "hash", 100.0)
    assert [ids.has(request_id, "hash", 101.0) for request_id in "abc"] == [True, False, True]
    ids.add("d", "hash", 200.0)
    assert len(ids._until_s) == 1
