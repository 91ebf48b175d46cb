from hypothesis import given
from hypothesis import strategies as st

from kaveri.policy.rate_limit import RateLimit


def test_a_burst_passes_and_then_so_many_a_second() -> None:
    limit = RateLimit(10.0, 3, 100.0)
    assert [limit.wait_s(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]
    assert limit.wait_s(100.0625) == 0.0375
    assert [limit.wait_s(100.125) == 0, limit.wait_s(100.125) == 0] == [True, False]
    assert [limit.wait_s(200.0) == 0 for _ in range(4)] == [True, True, True, False]


@given(st.lists(st.floats(0, 2), max_size=60), st.integers(1, 5), st.floats(0.5, 20))
def test_no_more_pass_than_the_burst_and_the_rate_allow(pauses: list[float], burst: int, per_s: float) -> None:
    limit, now_s, passed = RateLimit(per_s, burst, 0.0), 0.0, 0
    for pause_s in pauses:
        now_s += pause_s
        passed += limit.wait_s(now_s) == 0
        assert passed <= burst + now_s * per_s + 1e-6
