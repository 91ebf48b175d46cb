import pytest

from kaveri.policy.busy_rate import BusyRate


def test_pauses_without_work_do_not_slow_the_rate() -> None:
    rate = BusyRate()
    assert rate.per_s == 0.0
    for began_s in (0.0, 100.0, 200.0):
        rate.begin(began_s)
        rate.begin(began_s + 0.1)
        rate.done(50, began_s + 0.5, has_more=True)
        rate.done(50, began_s + 1.0, has_more=False)
    assert rate.per_s == pytest.approx(100.0)


def test_recent_work_counts_more() -> None:
    rate = BusyRate()
    rate.begin(0.0)
    for second in range(1, 30):
        rate.done(100, float(second), has_more=True)
    for second in range(30, 60):
        rate.done(10, float(second), has_more=True)
    assert 10.0 <= rate.per_s < 11.0
