"""Decides how a request goes on after an attempt was lost, and records the loss."""

import time

from kaveri.domain.view import InstanceRecord
from kaveri.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    LayoutMismatch,
    ModelNotFound,
    NoCapacity,
    RequestAlreadyExists,
)
from kaveri.lives import request_values as lives
from kaveri.policy.retry import RetryLimits, RetryState, Setback, after_setback
from kaveri.telemetry.logs import get_logger
from services.router import metrics
from services.router.requests import RequestEntry

NON_RETRYABLE = (InvalidArgument, LayoutMismatch, ModelNotFound, DeadlineExceeded, RequestAlreadyExists, EngineError)
"""Errors that the request would meet on any other instance too."""


def after_loss(
    entry: RequestEntry,
    lost: lives.Lost,
    prefill: InstanceRecord | None,
    retry: RetryState,
    limits: RetryLimits,
    jitter: float,
) -> RetryState:
    """Record a lost attempt, and return the retry state for the next one. Raises its error if there is none.
    prefill: the instance that the attempt was sent to; None: it was resumed. jitter: random, in [0, 1)."""
    if lost.setback is Setback.REFUSED:
        entry.account.timing.attempts -= 1
        if isinstance(lost.error, RequestAlreadyExists):
            raise lost.error
        return retry
    if lost.setback in (Setback.LOST, Setback.BROKEN):
        entry.note_loss(str(lost.error), lost.decode or lost.attempt.prefill)
        metrics.LOST_ATTEMPTS.inc()
        get_logger().warning(
            "attempt_lost",
            request_id=entry.request_id,
            attempt=lost.attempt.number,
            prefill_instance_id=lost.attempt.prefill.instance_id,
            decode_instance_id=lost.decode.instance_id if lost.decode is not None else "",
            generated_tokens=lost.next_index,
            error=str(lost.error),
        )
    else:
        entry.account.timing.attempts -= 1
        if lost.replica is None:
            # With a replica, the request only leaves an instance that drains.
            entry.note_delay(str(lost.error))
    if isinstance(lost.error, NON_RETRYABLE):
        raise lost.error
    after = after_setback(
        retry,
        limits,
        lost.setback,
        prefill if lost.is_prefills_fault else None,
        time.monotonic(),
        jitter,
        lost.error.retry_after_s if isinstance(lost.error, NoCapacity) else 0.0,
    )
    if after is None:
        raise lost.error
    return after
