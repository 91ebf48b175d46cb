"""Which rows of the table of faults a fault hits, by what the requests of the cluster are doing when it happens.

The table is in docs/fault-tolerance.md. What routers know of their requests is taken for what is: a router may be late.
"""

from collections.abc import Iterator

from kaveri.domain.view import Role
from kaveri.lives.request_values import (
    Decoding,
    InstanceLife,
    Lost,
    Placed,
    Prefilling,
    Resuming,
    SeekingOwner,
    Unplaced,
)
from services.router.requests import RequestEntry
from tests.simulation.cluster.plan import Fault, FaultKind
from tests.simulation.cluster.store import STORE_NAME
from tests.simulation.cluster.world import World

HOW = {
    FaultKind.KILL: "killed",
    FaultKind.RESTART: "killed",
    FaultKind.ENGINE: "engine broken",
    FaultKind.STUCK: "engine stuck",
    FaultKind.FREEZE: "frozen",
    FaultKind.ISOLATE: "cut off",
    FaultKind.CUT: "cut off",
    FaultKind.CUT_ONE_WAY: "cut off",
    FaultKind.RESET: "cut off",
    FaultKind.DAMAGE: "damaged",
    FaultKind.DRAIN: "drained",
    FaultKind.UNDRAIN: "drained",
    FaultKind.CLIENT: "killed",
}
"""What happens, as a column of the table. Kinds that are not here slow something, or are the store's."""
_OF_THE_STORE = (FaultKind.STORE_AWAY, FaultKind.STORE_LOST, FaultKind.STORE_EMPTIED, FaultKind.STORE_REFUSES)
_LINKS = (FaultKind.CUT, FaultKind.CUT_ONE_WAY, FaultKind.RESET)
_WHOLE_BUT_BLOCKS = 2
_TOGETHER_S = 1.0
"""Faults that begin within so long of one another hit together."""


class FaultRows:
    """Names the rows of each fault of one schedule as it happens."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_hit_s: dict[str, float] = {}

    def rows(self, fault: Fault) -> list[str]:
        """The rows that this fault hits now, as "row: how", each once."""
        if fault.kind in _OF_THE_STORE:
            return [f"store: {fault.kind.removeprefix('store_')}"]
        if fault.kind not in HOW:
            return []
        now_s = self._world.now()
        found = dict.fromkeys(self._links(fault) if fault.kind in _LINKS else self._rows_of(fault, now_s))
        if fault.kind not in _LINKS:
            self._last_hit_s[fault.target] = now_s + fault.lasts_s
        return [f"{row}: {HOW[fault.kind]}" for row in found]

    def _rows_of(self, fault: Fault, now_s: float) -> Iterator[str]:
        world, target = self._world, fault.target
        if target == STORE_NAME:
            yield "store"
        if target in world.clients:
            yield from self._of_client(target, now_s)
        if target in world.lives and world.lives[target].planned.role is Role.PREDICTOR:
            yield "predictor"
        for router, entry in self._entries():
            owner, holder = _owner(entry), _holder(entry)
            if target == router:
                yield f"router, {_phase(entry)}"
                if owner is not None and self._is_hit(owner.instance_id, now_s):
                    yield "owner and router"
            if target == _prefill(entry):
                yield f"prefill, {_phase(entry)}"
            if owner is not None and target == owner.instance_id:
                yield f"owner, {self._copy(entry)}"
                if holder is not None and self._is_hit(holder, now_s):
                    yield "owner and holder"
                if self._is_hit(router, now_s):
                    yield "owner and router"
            if holder is not None and target == holder:
                yield "holder"
                if owner is not None and self._is_hit(owner.instance_id, now_s):
                    yield "owner and holder"
            if _recovers(entry) and target in (router, holder, _prefill(entry), owner and owner.instance_id):
                yield f"second fault during a recovery, {_phase(entry)}"
        if any(run == target for run in self._finished_owners()):
            yield "owner, between its last token and the client's"

    def _links(self, fault: Fault) -> Iterator[str]:
        ends = {fault.target, fault.other}
        if STORE_NAME in ends:
            yield "link to the store"
        if ends & self._world.clients.keys():
            yield "link client-router"
        for router, entry in self._entries():
            owner, holder = _owner(entry), _holder(entry)
            if owner is not None and ends == {owner.instance_id, holder}:
                yield "link owner-holder"
            if owner is not None and ends == {owner.instance_id, router}:
                yield "link owner-router"
            if ends == {_prefill(entry), router}:
                yield "link prefill-router"
            if owner is not None and ends == {_prefill(entry), owner.instance_id}:
                yield "link prefill-owner"

    def _of_client(self, target: str, now_s: float) -> Iterator[str]:
        world = self._world
        for outcome in world.outcomes:
            if outcome.ended_s is None and world.client_of.get(outcome.request_id) == target:
                yield "client and its router" if self._is_hit(outcome.router, now_s) else "client"

    def _entries(self) -> Iterator[tuple[str, RequestEntry]]:
        for life in self._world.lives.values():
            if life.router is not None:
                for entry in life.router.table.entries():
                    yield life.name, entry

    def _is_hit(self, name: str, now_s: float) -> bool:
        """Whether something happens to the process, or has just happened."""
        until_s = self._last_hit_s.get(name)
        dead = name in self._world.lives and self._world.lives[name].ended
        return dead or (until_s is not None and now_s <= until_s + _TOGETHER_S)

    def _copy(self, entry: RequestEntry) -> str:
        replica = entry.state.replica if isinstance(entry.state, Placed | Decoding | Lost) else None
        if replica is None:
            return "no copy"
        context = entry.context_tokens
        lacking = context - replica.token_count
        return "copy whole" if lacking <= _WHOLE_BUT_BLOCKS * self._world.model.block_tokens else "copy behind"

    def _finished_owners(self) -> Iterator[str]:
        """Instances that have drawn the last token of an answer whose client lacks it."""
        world = self._world
        names = {life.engine.info.epoch: life.name for life in world.lives.values() if life.engine is not None}
        for outcome in world.outcomes:
            most = outcome.params.max_tokens
            if outcome.ended_s is None and most is not None and len(outcome.token_ids) < most:
                run = world.draws.last_run.get((outcome.request_id, most - 1))
                if run is not None and run.epoch in names:
                    yield names[run.epoch]


def _owner(entry: RequestEntry) -> InstanceLife | None:
    match entry.state:
        case Decoding() | Resuming() | Placed() | Lost():
            return entry.state.decode
        case _:
            return None


def _holder(entry: RequestEntry) -> str | None:
    match entry.state:
        case Placed() | Decoding() | Lost() if entry.state.replica is not None:
            return entry.state.replica.holder_id
        case _:
            return None


def _prefill(entry: RequestEntry) -> str | None:
    match entry.state:
        case Prefilling() | Placed():
            return entry.state.attempt.prefill.instance_id or None
        case _:
            return None


def _phase(entry: RequestEntry) -> str:
    match entry.state:
        case Unplaced() | SeekingOwner() | Lost():
            return "not placed"
        case Prefilling():
            return "queued or computing"
        case Placed():
            return "pushing or waiting for room"
        case Resuming():
            return "resuming"
        case Decoding():
            return "decoding"
        case _:
            return "ending"


def _recovers(entry: RequestEntry) -> bool:
    """Whether it has lost an instance or a router, and has had no token since."""
    is_again = entry.account.owner_change is not None or (
        entry.accepted.session > 0 and not isinstance(entry.state, Decoding)
    )
    return is_again or isinstance(entry.state, Lost | Resuming | SeekingOwner)
