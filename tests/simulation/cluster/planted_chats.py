"""Planted bugs in tool calls and reasoning. See planted.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from services.gateway import formats
from services.router.intake import Intake
from tests.simulation.cluster.planting import planted, replaced


@planted
def parser_begins_anew_at_a_reattach() -> Iterator[None]:
    """The gateway makes a new parser of tool calls and reasoning at each re-attach."""

    def make(original: Any) -> Any:
        def read(self: Any, chunk: Any, form: Any) -> Any:
            # The form comes again with the first response of each session.
            if self.parser is not None and self.parser.__dict__.get("form") is not form:
                self.parser = None
            parts = original(self, chunk, form)
            self.parser.__dict__["form"] = form
            return parts

        return read

    with replaced(formats._Answer, "read", make):
        yield


@planted
def grammar_of_calls_lost_at_a_reattach() -> Iterator[None]:
    """After a re-attach, the router drops the grammar of required tool calls."""

    def make(original: Any) -> Any:
        async def accept(self: Any, request: Any, request_id: str, params: Any, *args: Any, **named: Any) -> Any:
            accepted = await original(self, request, request_id, params, *args, **named)
            if not request.session or request.WhichOneof("prompt") != "messages":
                return accepted
            return replace(accepted, params=replace(accepted.params, grammar=params.grammar))

        return accept

    with replaced(Intake, "accept", make):
        yield
