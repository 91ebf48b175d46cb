"""Definitions of TTFT, TPOT and JCT, for single requests and for columns of requests. Pure."""

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

ValueT = TypeVar("ValueT", float, npt.NDArray[np.float64])


def ttft(due_s: ValueT, first_s: ValueT) -> ValueT:
    """Time to first token, from when the request was due, so a client's delay is included."""
    return first_s - due_s


def tpot(first_s: ValueT, last_s: ValueT, received_tokens: ValueT) -> ValueT:
    """Time per output token after the first. There must be a second one."""
    return (last_s - first_s) / (received_tokens - 1)


def jct(due_s: ValueT, last_s: ValueT) -> ValueT:
    """Job completion time, from when the request was due to its last token."""
    return last_s - due_s


class Outcome(Protocol):
    """Times and token count of one request. Times are seconds of one clock; None: it did not happen."""

    @property
    def due_s(self) -> float:
        """Planned send time."""

    @property
    def first_s(self) -> float | None:
        """Time of the first received token."""

    @property
    def last_s(self) -> float | None:
        """Time of the last received token."""

    @property
    def received_tokens(self) -> int:
        """Number of received answer tokens."""

    @property
    def error(self) -> str | None:
        """Name of the error that ended it; None if it was answered."""


def ttft_s(record: Outcome) -> float | None:
    return None if record.first_s is None else ttft(record.due_s, record.first_s)


def tpot_s(record: Outcome) -> float | None:
    if record.first_s is None or record.last_s is None or record.received_tokens < 2:
        return None
    return tpot(record.first_s, record.last_s, float(record.received_tokens))


def jct_s(record: Outcome) -> float | None:
    return None if record.last_s is None else jct(record.due_s, record.last_s)
