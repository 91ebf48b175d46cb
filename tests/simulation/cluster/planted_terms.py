"""Planted bugs of sessions and attempts: each accepts late messages of a former one. See planted.py."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kaveri.domain.owner import Term
from services.decode.instance import DecodeInstance
from services.decode.owners import RequestOwners
from services.prefill.role import PrefillRole
from services.router.token_feeds import TokenFeeds
from tests.simulation.cluster.planting import planted, replaced


class _AboveAll(int):
    """A number that `<=` finds above all others."""

    def __le__(self, other: int) -> bool:
        return False


def _as_new(ownership: Any, present: Any) -> Any:
    """The owner, as new as the present one at least."""
    return ownership._replace(term=max(ownership.term, present.term))


@planted
def late_abort_obeyed() -> Iterator[None]:
    """A late Abort of an earlier attempt ends the present one at decode."""

    def make(original: Any) -> Any:
        def abort(self: Any, request_id: str, ownership: Any, *args: Any, **named: Any) -> None:
            request = self.owners.by_id.get(request_id)
            if request is not None and ownership.term.session == request.ownership.term.session:
                ownership = _as_new(ownership, request.ownership)
            original(self, request_id, ownership, *args, **named)

        return abort

    with replaced(DecodeInstance, "abort", make):
        yield


@planted
def late_abort_of_a_prompt_obeyed() -> Iterator[None]:
    """A late Abort of an earlier session or attempt ends the present one at prefill."""

    def make(original: Any) -> Any:
        def abort(self: Any, request_id: str, ownership: Any) -> None:
            life = self._lives.get(request_id)
            original(self, request_id, ownership if life is None else _as_new(ownership, life.request.ownership))

        return abort

    with replaced(PrefillRole, "abort", make):
        yield


@planted
def abort_outlasts_its_attempt() -> Iterator[None]:
    """An Abort that reaches prefill before its request ends all later attempts too."""

    def make(original: Any) -> Any:
        def end_former(self: Any, request_id: str, ownership: Any) -> None:
            if self._aborted.get(request_id, time.monotonic()) is not None:
                self._aborted.put(request_id, ownership, time.monotonic())
            original(self, request_id, ownership)

        return end_former

    with replaced(PrefillRole, "_replace", make):
        yield


@planted
def late_attach_obeyed() -> Iterator[None]:
    """Decode gives a request back to an earlier session that asks late."""

    def make(original: Any) -> Any:
        def attach(self: Any, attachment: Any) -> Any:
            # No session or attempt is older than another one meanwhile.
            with replaced(Term, "__lt__", lambda _: lambda *_: False):
                return original(self, attachment)

        return attach

    with replaced(RequestOwners, "attach", make):
        yield


@planted
def late_attach_of_a_prompt_obeyed() -> Iterator[None]:
    """Prefill gives a request back to an earlier session that asks late."""

    def make(original: Any) -> Any:
        def attach(self: Any, attachment: Any) -> Any:
            session, attempt = attachment.ownership.term
            ownership = attachment.ownership._replace(term=Term(_AboveAll(session), attempt))
            return original(self, replace(attachment, ownership=ownership))

        return attach

    with replaced(PrefillRole, "attach", make):
        yield


@planted
def reports_of_any_attempt() -> Iterator[None]:
    """The router treats prefill's reports on earlier sessions and attempts as reports on the present one."""

    def make(original: Any) -> Any:
        def deliver(self: Any, subscription: Any, report: Any) -> None:
            entry = self._table.get(report.request_id)
            tie = subscription.ties.get((entry, True))
            if tie is not None:
                report.term.session, report.term.attempt = entry.accepted.session, tie.number
            original(self, subscription, report)

        return deliver

    with replaced(TokenFeeds, "_deliver_report", make):
        yield
