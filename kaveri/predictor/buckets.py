"""Buckets of answer lengths. Pure.

tokens   0          granularity      2 * granularity   ...   granularity * (count - 1)        longest answer
         [ bucket 0 )[   bucket 1   )[                 ...   )[        bucket count - 1, open        ...
"""

from collections.abc import Sequence

from kaveri.domain.length import TokenRange


def bucket_of(tokens: int, granularity: int, count: int) -> int:
    """Return the index of the bucket for an answer of `tokens` tokens. The last one also holds all longer answers."""
    return min(tokens // granularity, count - 1)


def range_of(bucket: int, granularity: int, count: int, longest_answer_tokens: int) -> TokenRange:
    """Return the answer lengths in a bucket. The last ends after the longest known answer, but has at least
    `granularity` lengths. Raises IndexError for a bucket outside [0, count)."""
    if not 0 <= bucket < count:
        raise IndexError(f"bucket {bucket} of {count}")
    high = granularity * (bucket + 1)
    return TokenRange(granularity * bucket, max(high, longest_answer_tokens + 1) if bucket == count - 1 else high)


def merge_buckets(probabilities: Sequence[float], factor: int) -> list[float]:
    """Return the probabilities of buckets `factor` times as wide: each is the sum over `factor` neighbours."""
    return [sum(probabilities[start : start + factor]) for start in range(0, len(probabilities), factor)]
