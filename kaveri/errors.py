"""Every error that Kaveri raises on purpose.

KaveriError
├── InvalidArgument       the caller's input breaks a limit: field, value, limit
├── ModelNotFound         no such model: model, served
├── RequestAlreadyExists  the request id is in flight: request_id
├── RequestNotFound       no such request is here: request_id, reason
├── NoCapacity            a queue or a pool is full now: role, retry_after_s
├── Unavailable           no instance can serve this now: retry_after_s
│   └── EngineBroke       the instance's engine raised an exception in a step: suspect_until
├── Unauthenticated       the caller shows no key or certificate that is good here: reason
├── StaleAttempt          a newer attempt of the request is known: request_id, attempt, newest_attempt
├── DeadlineExceeded      the request's deadline has passed
├── RequestCancelled      the request was cancelled, but not by this caller: request_id
├── SlowReader            a client did not read its answer: limit_s
├── Unsupported           this instance does not offer that: reason
├── LayoutMismatch        two KV pools cannot exchange blocks: field, ours, theirs
├── TransferFailed        a KV push ended without acceptance: reason
├── EngineError           the engine failed, on one request or as a whole: reason
├── InternalError         a bug in this process, written to its log: reason
└── ConfigError           a setting is invalid; the process cannot start: field, reason

kaveri/wire/status.py maps them to gRPC statuses.
"""

from collections.abc import Sequence
from typing import cast

_SHOWN_CHARACTERS = 120


class KaveriError(Exception):
    """Root of all errors that Kaveri raises on purpose. Survives pickle and copy with its data."""

    def __reduce__(self) -> tuple[object, ...]:
        # Exception would call the class with the message alone.
        return _restored, (type(self), self.args), self.__dict__


class InvalidArgument(KaveriError):
    """The caller's input breaks a limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {_shown(value)}; it must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class ModelNotFound(KaveriError):
    """No such model is served here."""

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        known = f"; served here: {', '.join(served)}" if served else ""
        super().__init__(f"model {_shown(model)} is not served here{known}")
        self.model = model
        self.served = served


class RequestAlreadyExists(KaveriError):
    """A request with this id is in flight."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} is in flight already")
        self.request_id = request_id


class RequestNotFound(KaveriError):
    """No such request is here, or it cannot be attached."""

    def __init__(self, request_id: str, reason: str = "unknown") -> None:
        super().__init__(f"request {request_id!r} is not here: {reason}")
        self.request_id = request_id
        self.reason = reason


class NoCapacity(KaveriError):
    """A queue or a pool is full now; the same call can succeed later."""

    def __init__(self, role: str, retry_after_s: float, reason: str = "no room") -> None:
        super().__init__(f"{role}: {reason}; try again in {retry_after_s:g} s")
        self.role = role
        self.retry_after_s = retry_after_s
        self.reason = reason


class Unavailable(KaveriError):
    """No instance can serve this now."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class EngineBroke(Unavailable):
    """The instance's engine has raised an exception in a step, and ends. The request goes on elsewhere."""

    def __init__(self, reason: str, suspect_until: int = 0) -> None:
        """suspect_until: the request was in that step, and stays suspect until its answer has this many tokens. 0: it
        was not, or another request was at fault."""
        super().__init__(reason)
        self.suspect_until = suspect_until


class Unauthenticated(KaveriError):
    """The caller has no valid key or certificate."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StaleAttempt(KaveriError):
    """A newer attempt of the same request is known."""

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
    """The request was cancelled by another caller."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} was cancelled")
        self.request_id = request_id


class SlowReader(KaveriError):
    """A client did not read its answer in time; the request has ended."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the client read nothing of its answer for {limit_s:g} s; the request has ended")
        self.limit_s = limit_s


class Unsupported(KaveriError):
    """The instance that was asked does not offer this; another one may."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LayoutMismatch(KaveriError):
    """Two KV pools cannot exchange blocks."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"KV layouts differ in {field}: {ours!r} here, {theirs!r} there")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class TransferFailed(KaveriError):
    """A KV push ended without acceptance."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"KV transfer failed: {reason}")
        self.reason = reason


class EngineError(KaveriError):
    """The engine failed: as a whole, so that the process that hosts it should end; or on one request, which must not be
    tried again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"engine failed: {reason}")
        self.reason = reason


class InternalError(KaveriError):
    """A bug; the process that raises it has logged the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigError(KaveriError):
    """A setting is invalid, and the process cannot start; shown as one line, without a traceback."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def _restored(kind: type[KaveriError], args: tuple[object, ...]) -> KaveriError:
    return kind.__new__(kind, *args)


def _shown(value: object) -> str:
    """Shorten repr(value). Cost does not grow with the size of the value."""
    cut = value
    if type(value) in (str, bytes, list, tuple):
        cut = cast(Sequence[object], value)[:_SHOWN_CHARACTERS]
    shown = f"{cut!r:.{_SHOWN_CHARACTERS + 1}}"
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
