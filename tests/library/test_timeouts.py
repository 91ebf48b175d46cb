"""The order of the serving path's times is looked at when a process starts."""

import pytest

from kaveri import timeouts
from kaveri.timeouts import check_order


def test_the_times_are_in_order() -> None:
    check_order()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("BEAT_S", 0.6, "a stream that beats"),
        ("COMPLETE_COPY_S", 1.0, "a copy outlives"),
        ("STRAGGLER_S", 1.0, "no call of a former attempt"),
    ],
)
def test_a_time_out_of_order_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: float, reason: str) -> None:
    monkeypatch.setattr(timeouts, name, value)
    with pytest.raises(AssertionError, match=reason):
        check_order()
