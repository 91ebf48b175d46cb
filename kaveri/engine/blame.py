"""Chooses the requests that are blamed for an engine's exception, and the errors that they end with. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from kaveri.engine.contract import EngineKey, EngineStopped, RequestFailed
from kaveri.errors import EngineBroke, EngineError, Unavailable


class StepMember(NamedTuple):
    """A request of a step."""

    key: EngineKey
    draw_index: int
    """Index of the next token to draw."""
    suspect_until: int


def last_events(reason: str, members: Iterable[StepMember]) -> tuple[RequestFailed | EngineStopped, ...]:
    """Return the last events of an engine in which a step with these requests has raised. A suspect is blamed alone;
    without one each of them becomes a suspect until it has drawn the token of that step."""
    members = tuple(members)
    for key, draw_index, suspect_until in members:
        if draw_index < suspect_until:
            return RequestFailed(key, reason, is_final=True), EngineStopped(reason, {})
    return (EngineStopped(reason, {key: draw_index + 1 for key, draw_index, _ in members}),)


def error_of_failure(event: RequestFailed) -> EngineError | Unavailable:
    """Return the error of a request that its engine has ended."""
    if event.is_final:
        return EngineError(f"request {event.key.request_id!r}: {event.reason}")
    return Unavailable(event.reason)


def error_of_stop(event: EngineStopped, key: EngineKey) -> Unavailable:
    """Return the error of a request whose engine broke."""
    reason = f"the engine stopped: {event.reason}"
    return Unavailable(reason) if event.suspects is None else EngineBroke(reason, event.suspects.get(key, 0))
