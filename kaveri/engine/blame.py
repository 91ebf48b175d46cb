"""Picks the requests to blame when a model step raises an exception, and the errors they end with. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from kaveri.engine.contract import EngineKey, EngineStopped, RequestFailed
from kaveri.errors import EngineBroke, EngineError, Unavailable


class StepMember(NamedTuple):
    """A request in the step that raised; a suspect (it was in an earlier failed step) if draw_index < suspect_until."""

    key: EngineKey
    draw_index: int
    """Index, within the answer, of the next token to draw."""
    suspect_until: int


def last_events(reason: str, members: Iterable[StepMember]) -> tuple[RequestFailed | EngineStopped, ...]:
    """Return the final events of an engine whose step raised. A member that was in an earlier failed step (a suspect)
    is failed alone; without one, every member becomes a suspect until it has drawn its next token."""
    members = tuple(members)
    for key, draw_index, suspect_until in members:
        if draw_index < suspect_until:
            return RequestFailed(key, reason, is_final=True), EngineStopped(reason, {})
    return (EngineStopped(reason, {key: draw_index + 1 for key, draw_index, _ in members}),)


def error_of_failure(event: RequestFailed) -> EngineError | Unavailable:
    """Return the error for a request that its engine failed: EngineError if final, else Unavailable."""
    if event.is_final:
        return EngineError(f"request {event.key.request_id!r}: {event.reason}")
    return Unavailable(event.reason)


def error_of_stop(event: EngineStopped, key: EngineKey) -> Unavailable:
    """Return the error for a request whose engine stopped: EngineBroke if a step raised, else Unavailable."""
    reason = f"the engine stopped: {event.reason}"
    return Unavailable(reason) if event.suspects is None else EngineBroke(reason, event.suspects.get(key, 0))
