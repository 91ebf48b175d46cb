"""Buckets of answer lengths. Pure.

tokens   0          granularity      2 * granularity   ...   granularity * (count - 1)        longest answer
         [ bucket 0 )[   bucket 1   )[                 ...   )[        bucket count - 1, open        ...
"""

from collections.abc import Sequence

from kaveri.domain.length import TokenRange


def bucket_of(tokens: int, granularity: int, count: int) -> int:
    """The bucket that an answer of so many tokens falls into. The last one takes whatever is longer."""
    return min(tokens // granularity, count - 1)


def range_of(bucket: int, granularity: int, count: int, longest_answer_tokens: int) -> TokenRange:
    """The lengths in a bucket. The last one ends after the longest answer that was seen, or after its granularity.

    Raises IndexError for a bucket that is none.
    """
    if not 0 <= bucket < count:
        raise IndexError(f"bucket {bucket} of {count}")
    high = granularity * (bucket + 1)
    return TokenRange(granularity * bucket, max(high, longest_answer_tokens + 1) if bucket == count - 1 else high)


def merge_buckets(probabilities: Sequence[float], factor: int) -> list[float]:
    """The probabilities of buckets `factor` times as wide: sums over as many neighbours."""
    return [sum(probabilities[start : start + factor]) for start in range(0, len(probabilities), factor)]
