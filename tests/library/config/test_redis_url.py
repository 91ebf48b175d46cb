import pytest

from kaveri.config.redis_url import database_of, shown


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("redis://host", 0),
        ("redis://host:1/", 0),
        ("redis://host/3", 3),
        ("rediss://user:pass@host:1/12?db=4", 4),
        ("unix:///run/redis.sock", 0),
        ("unix:///run/redis.sock?db=5", 5),
        ("redis://host?db=6", 6),
    ],
)
def test_database_is_read_as_redis_py_reads_it(url: str, database: int) -> None:
    assert database_of(url) == database


@pytest.mark.parametrize("url", ["redis://host/blue", "redis://host/1/2", "redis://host/-1", "redis://host?db=x"])
def test_database_that_is_no_number_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no number"):
        database_of(url)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://***@host:1/0"),
        ("rediss://user:secret@host/0?password=secret", "rediss://***@host/0"),
        ("redis://host/0?password=secret", "redis://host/0"),
        ("redis://host/0?password=se@secret", "redis://***"),
        ("unix://user:secret@/run/redis.sock?db=1", "unix://***@/run/redis.sock"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        # Not percent-encoded.
        ("redis://:se/secret@host", "redis://***"),
        ("redis://:se?secret@host", "redis://***"),
        ("redis://:se#secret@host", "redis://***"),
        ("redis://:se@secret@host", "redis://***"),
        ("redis:user:secret@host", "***"),
        ("redis", "redis"),
    ],
)
def test_what_is_shown_has_no_password(url: str, text: str) -> None:
    assert shown(url) == text
