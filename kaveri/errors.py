"""Every error that Kaveri raises on purpose.

KaveriError
├── InvalidArgument       an argument breaks a limit: field, value, limit
├── ModelNotFound         no model of this name is served: model, served
├── RequestAlreadyExists  another request with this id is in flight: request_id
├── RequestNotFound       no request with this id is here: request_id, reason
├── NoCapacity            a queue or a pool is full: role, retry_after_s
├── Unavailable           no instance can serve the request: retry_after_s
│   └── EngineBroke       the instance's engine raised an exception in a step: suspect_until
├── Unauthenticated       the caller has no valid API key or certificate: reason
├── StaleAttempt          a newer attempt of the request is known: request_id, attempt, newest_attempt
├── DeadlineExceeded      the request's deadline has passed
├── RequestCancelled      another caller has cancelled the request: request_id
├── SlowReader            a client did not read its answer in time: limit_s
├── Unsupported           this instance does not offer the operation: reason
├── LayoutMismatch        two KV pools cannot exchange blocks: field, ours, theirs
├── TransferFailed        the receiver did not accept a KV push: reason
├── EngineError           the engine failed, on one request or as a whole: reason
├── InternalError         a bug; its cause is in the process's log: reason
└── ConfigError           a setting is invalid; the process cannot start: field, reason

kaveri/wire/status.py maps errors to gRPC statuses.
"""

from collections.abc import Sequence
from typing import cast

_SHOWN_CHARACTERS = 120


class KaveriError(Exception):
    """Base class of all errors that Kaveri raises on purpose. Pickle and copy keep its data."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception would call the class with the message alone.
        return _restored, (type(self), self.args), self.__dict__


class InvalidArgument(KaveriError):
    """An argument breaks a limit: its field, the value, and the limit in words."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {_shown(value)}; it must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ModelNotFound(KaveriError):
    """No model of this name is served."""

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        known = f"; served here: {', '.join(served)}" if served else ""
        super().__init__(f"model {_shown(model)} is not served here{known}")
        self.model = model
        self.served = served


class RequestAlreadyExists(KaveriError):
    """Another request with this id is in flight."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} is in flight already")
        self.request_id = request_id


class RequestNotFound(KaveriError):
    """No request with this id is here, or a client cannot reconnect to it."""

    def __init__(self, request_id: str, reason: str = "unknown") -> None:
        super().__init__(f"request {request_id!r} is not here: {reason}")
        self.request_id = request_id
        self.reason = reason


class NoCapacity(KaveriError):
    """A queue or a pool is full; the same call may succeed after retry_after_s seconds."""

    def __init__(self, role: str, retry_after_s: float, reason: str = "no room") -> None:
        super().__init__(f"{role}: {reason}; try again in {retry_after_s:g} s")
        self.role = role
        self.retry_after_s = retry_after_s
        self.reason = reason


class Unavailable(KaveriError):
    """No instance can serve the request at this time. retry_after_s: seconds; None: unknown."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class EngineBroke(Unavailable):
    """The instance's engine raised an exception in a step, and its process ends. The request moves elsewhere."""

    def __init__(self, reason: str, suspect_until: int = 0) -> None:
        """suspect_until: number of tokens that the request's answer must have before the request no longer counts as a
        suspected cause of the exception; 0: not suspected."""
        super().__init__(reason)
        self.suspect_until = suspect_until


class Unauthenticated(KaveriError):
    """The caller has no valid API key or certificate."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StaleAttempt(KaveriError):
    """A newer attempt (placement on instances, numbered from 1) of the same request is known."""

    def __init__(self, request_id: str, attempt: int, newest_attempt: int) -> None:
        super().__init__(f"attempt {attempt} of request {request_id!r} is older than attempt {newest_attempt}")
        self.request_id = request_id
        self.attempt = attempt
        self.newest_attempt = newest_attempt


class DeadlineExceeded(KaveriError):
    """The request's deadline has passed."""

    def __init__(self, what: str = "the request") -> None:
        super().__init__(f"{what} passed its deadline")
        self.what = what


class RequestCancelled(KaveriError):
    """Another caller has cancelled the request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} was cancelled")
        self.request_id = request_id


class SlowReader(KaveriError):
    """A client did not read its answer for limit_s seconds; the request has ended."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the client read nothing of its answer for {limit_s:g} s; the request has ended")
        self.limit_s = limit_s


class Unsupported(KaveriError):
    """This instance does not offer the operation; another one may."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LayoutMismatch(KaveriError):
    """Two KV pools cannot exchange blocks, because a field of their layouts differs."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"KV layouts differ in {field}: {ours!r} here, {theirs!r} there")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class TransferFailed(KaveriError):
    """The receiver did not accept a KV push."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"KV transfer failed: {reason}")
        self.reason = reason


class EngineError(KaveriError):
    """The engine failed on one request, which must not be retried, or as a whole; then its process should end."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"engine failed: {reason}")
        self.reason = reason


class InternalError(KaveriError):
    """A bug in Kaveri; its cause is in the log of the process that raises this."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(KaveriError):
    """A setting is invalid and the process cannot start. Shown as one line, without a traceback."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def _restored(kind: type[KaveriError], args: tuple[object, ...]) -> KaveriError:
    return kind.__new__(kind, *args)


def _shown(value: object) -> str:
    cut = value
    if type(value) in (str, bytes, list, tuple):
        cut = cast(Sequence[object], value)[:_SHOWN_CHARACTERS]
    shown = f"{cut!r:.{_SHOWN_CHARACTERS + 1}}"
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
