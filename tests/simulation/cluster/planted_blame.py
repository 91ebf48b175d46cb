"""Planted bugs of what an exception of an engine is put down to: see planted.py."""

from collections.abc import Iterator
from typing import Any

from kaveri.engine import shared
from kaveri.engine.stepwise.sequence import Sequence
from kaveri.lives import request as request_life
from tests.simulation.cluster.planting import planted, replaced


@planted
def suspicion_forgotten() -> Iterator[None]:
    """The router does not say, with the next attempt, that an engine has raised in a step with the request."""
    with replaced(request_life, "_with_suspicion", lambda _: lambda attempt, _: attempt):
        yield


@planted
def suspect_not_blamed() -> Iterator[None]:
    """An engine that raises in a step with a suspect takes all of its requests for suspects."""

    def make(original: Any) -> Any:
        return lambda reason, members: original(reason, [member._replace(suspect_until=0) for member in members])

    with replaced(shared, "last_events", make):
        yield


@planted
def suspects_together() -> Iterator[None]:
    """A step takes suspects together with others."""
    with replaced(Sequence, "is_suspect", lambda _: False):
        yield
