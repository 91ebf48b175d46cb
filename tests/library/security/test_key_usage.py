import pytest
import structlog.testing

from kaveri.errors import NoCapacity
from kaveri.security.api_keys import ApiKey, KeyLimits
from kaveri.security.key_usage import KeyUsage
from tests.support.redis_fixture import run_redis

_LIMITED = ApiKey("alice", b"", KeyLimits(requests_per_s=3, tokens_per_min=100))


async def test_requests_past_the_limit_are_refused_and_told_when_to_come_again() -> None:
    usage = KeyUsage()
    for _ in range(3):
        await usage.take_request(_LIMITED)
    with pytest.raises(NoCapacity, match="API key alice: its limit of 3 requests a second is reached") as refused:
        await usage.take_request(_LIMITED)
    assert 0 < refused.value.retry_after_s <= 1
    await usage.take_request(ApiKey("bob", b"", KeyLimits(requests_per_s=3)))


async def test_tokens_are_counted_when_a_request_ends_and_refuse_the_next() -> None:
    usage = KeyUsage()
    await usage.take_request(_LIMITED)
    await usage.add_tokens(_LIMITED, 99)
    await usage.take_request(_LIMITED)
    await usage.add_tokens(_LIMITED, 5000)
    with pytest.raises(NoCapacity, match="100 tokens a minute") as refused:
        await usage.take_request(_LIMITED)
    assert 1 < refused.value.retry_after_s <= 60


async def test_a_key_without_limits_is_never_refused() -> None:
    usage, key = KeyUsage(), ApiKey("root", b"", KeyLimits())
    for _ in range(1000):
        await usage.take_request(key)
        await usage.add_tokens(key, 10**9)


async def test_processes_that_share_a_redis_share_the_limits_and_each_counts_alone_without_it() -> None:
    async with run_redis() as redis:
        one, other, foreign = KeyUsage(redis.url, "a"), KeyUsage(redis.url, "a"), KeyUsage(redis.url, "b")
        await one.add_tokens(_LIMITED, 100)
        with pytest.raises(NoCapacity, match="100 tokens a minute"):
            await other.take_request(_LIMITED)
        await foreign.take_request(_LIMITED)
        await redis.kill()
        with structlog.testing.capture_logs() as logged:
            await other.take_request(_LIMITED)
            await other.add_tokens(_LIMITED, 100)
            with pytest.raises(NoCapacity, match="100 tokens a minute"):
                await other.take_request(_LIMITED)
        assert [line["event"] for line in logged] == ["key_usage_not_shared"], "it rests for a while"
        for usage in (one, other, foreign):
            await usage.close()
