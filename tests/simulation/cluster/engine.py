"""An engine on an asyncio loop, without threads: its steps are timers, so simulated time and seeds decide everything.

Requests, blocks, batches and transfers are the stepwise engine's own code (kaveri/engine/stepwise_*.py, transfers.py).
Only the clock, the pool (kv_memory.py) and the transfers (kv_sender.py, kv_receiver.py) are simulated.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kaveri.domain.grammar import Grammar
from kaveri.engine.blame import StepMember
from kaveri.engine.contract import (
    EngineEvent,
    EngineInfo,
    EngineKey,
    EngineListener,
    EngineRequest,
    EngineStats,
    LetGo,
)
from kaveri.engine.copier import Copier
from kaveri.engine.kv_plane import Granted, PlaneEvent, PoolPlane
from kaveri.engine.shared import Shared
from kaveri.engine.stepwise.fake import FakeModel, StaleKv
from kaveri.engine.stepwise.lifecycle import Lifecycle, min_free_blocks
from kaveri.engine.stepwise.runner import Drawn, NoToken, SequenceSlice
from kaveri.engine.stepwise.sequence import PlannedSlice
from kaveri.engine.transfers import Transfers
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.telemetry.logs import get_logger
from kaveri.text.grammars import Grammars
from tests.simulation.cluster.draws import DrawRecord, DrawRun, life_salt, seed_salt
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_receiver import SimulatedReceiver
from tests.simulation.cluster.kv_sender import SimulatedSender
from tests.simulation.cluster.kv_wire import KvWire
from tests.simulation.cluster.replicas import SimulatedReplicas
from tests.simulation.cluster.tokenizer import make_grammars

_MOST_IN_FLIGHT = 4
_LOOK_EVERY_S = 0.1


class RequestOfDeath(Exception):
    """An injected fault: the forward pass raises wherever this request is computed."""


class _EndingShared(Shared):
    """on_stopped: called when the engine has broken."""

    def __init__(self, on_stopped: Callable[[], None]) -> None:
        super().__init__()
        self._on_stopped = on_stopped

    def stop(self, reason: str, members: Collection[StepMember] = ()) -> None:
        was_closing = self.closing
        super().stop(reason, members)
        if not was_closing:
            self._on_stopped()


class SimulatedEngine:
    """Both PrefillEngine and DecodeEngine (contract.py), on the running asyncio loop, for its thread only.

    Constructed within its simulated process: timers and callbacks run in the context of the constructor's caller.
    model: must have one layer. Greedy tokens follow FakeModel.answer(); with a temperature they depend on the seed too.
    wire: the KV network. rng: of this life of the engine alone; also gives its epoch.
    step_s: mean seconds of a step; each takes from half of it to one and a half.
    divergent: every life draws other tokens from the same prefix, and so does every request of it.
    draws: keeps what is drawn; None: nothing does. grammars: None: over tokens that are bytes.
    Raises ConfigError as StepwiseEngine does.
    """

    def __init__(
        self,
        model: FakeModel,
        *,
        wire: KvWire,
        rng: random.Random,
        block_count: int,
        chunk_tokens: int,
        max_batch: int,
        step_s: float,
        divergent: bool = False,
        draws: DrawRecord | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        layout = model.layout
        if layout.layer_count != 1:
            raise ConfigError("layer_count", f"is {layout.layer_count}; a simulated engine has 1")
        if layout.block_count(model.max_model_len) > block_count:
            raise ConfigError("max_model_len", f"{model.max_model_len} tokens do not fit into {block_count} blocks")
        self.draws = draws if draws is not None else DrawRecord()
        self._rng = rng
        self._step_s = step_s
        self._divergent = divergent
        self._context = contextvars.copy_context()
        self._model = model
        self._wire = wire
        self._memory = KvMemory(model, block_count)
        info = EngineInfo(
            engine="simulated",
            layout=layout,
            total_blocks=block_count,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset({model.eos_token_id}),
            epoch=rng.getrandbits(63),
            kv_endpoints=(),
            can_replicate=True,
            can_keep=True,
            runs_ahead=True,
        )
        self._shared = _EndingShared(self._end)
        self._grammars = grammars or make_grammars(None, model.vocab_size)
        self._lifecycle = Lifecycle(
            info, chunk_tokens, max_batch, self._shared.put, on_work=self._wake, grammars=self._grammars
        )
        now_s = asyncio.get_running_loop().time
        self._transfers = Transfers(info, self._shared, self._lifecycle, now_s=now_s, token_bytes=rng.randbytes)
        make_receiver = partial(SimulatedReceiver, self._memory, layout, wire, info.epoch, report=self.draws.report)
        make_sender = partial(SimulatedSender, self._memory, layout, wire)
        plane = PoolPlane(layout, make_sender, make_receiver, self._hear)
        self._transfers.attach(plane)
        self._plane = plane
        self._copier = Copier(
            layout,
            _MOST_IN_FLIGHT,
            self._shared,
            self._lifecycle,
            lambda block_id, *_: block_id,
            make_sender,
            on_work=self._wake_copier,
            now_s=now_s,
        )
        # When the copier looks for something to do next; None: nothing has changed.
        self._next_copy: asyncio.TimerHandle | None = None
        self.info = replace(info, kv_endpoints=self._transfers.endpoints)
        self.longest_ticket_s = 0.0
        """Of all tickets granted."""
        # Tickets that wait for the engine's next look at its commands.
        self._granted: set[asyncio.TimerHandle] = set()
        self._stalled = False
        self._woken = False
        """There is news since the last step was formed."""
        # The step that comes next or is under way; None: there is nothing to do.
        self._next: asyncio.Handle | None = None

    # Both sides.

    def start(self, listener: EngineListener) -> None:
        def recorded(events: Sequence[EngineEvent]) -> None:
            for event in events:
                if isinstance(event, LetGo):
                    self.draws.let_go[event.key.request_id] = event.token_count
                    self.draws.moves[event.key.request_id] += 1
            listener(events)

        self._shared.listener = recorded
        self._wake()

    def close(self) -> None:
        self._shared.close()
        self._end()

    def stall(self) -> None:
        """An injected fault: the engine makes no step until go_on()."""
        self._stalled = True

    def go_on(self) -> None:
        """Ends stall()."""
        self._stalled = False
        if self._next is not None and not self._shared.closing:
            self._next = asyncio.get_running_loop().call_soon(self._begin_step, context=self._context)

    def fail(self, reason: str) -> None:
        """An injected fault: the engine breaks, every request is lost, and EngineStopped is the last event."""
        self._shared.stop(reason)

    def stats(self) -> EngineStats:
        self._shared.turns.is_busy = self._next is not None
        return self._shared.counted(self._lifecycle.stats())

    def kv_flow(self) -> KvFlow:
        return self._transfers.flow()

    def abort(self, key: EngineKey) -> None:
        self._transfers.abort(key)
        self._wake_copier()
        self._shared.publish()

    def check_integrity(self) -> None:
        self._lifecycle.check_integrity()
        self._copier.check_integrity()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        self.info.require_servable(request)
        self._shared.require_alive()
        self._lifecycle.open_prefill(request)

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        self._transfers.push_to(key, ticket)

    # The decode side.

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        """As the contract. The future is done within a step's time."""
        self.longest_ticket_s = max(self.longest_ticket_s, expires_in_s)
        self.draws.let_go.pop(request.key.request_id, None)
        sequence, granted = self._transfers.reserve(request, expires_in_s, source, held_tokens)
        if sequence is not None:
            self._transfers.grant(sequence, sequence.block_ids)
        return granted

    def adopt(self, key: EngineKey) -> None:
        self._shared.require_alive()
        self._lifecycle.adopt(key)
        self._shared.publish()

    def prepare(self, grammar: Grammar) -> "Future[None]":
        prepared: Future[None] = Future()
        # On no thread, whose time would not be the simulation's.
        self._grammars.matcher(grammar)
        prepared.set_result(None)
        return prepared

    def admit(self, key: EngineKey) -> None:
        self._shared.require_alive()
        self._lifecycle.admit(key)

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        self._copier.replicate(key, ticket)

    def release(self, key: EngineKey, timeout_s: float) -> None:
        self._copier.release(key, timeout_s)

    def keep_replicas(self, listen: Sequence[KvEndpoint], epoch: int) -> SimulatedReplicas:
        """As the contract. The arguments are not read: the wire has addresses, and the seed gives the epoch."""
        self._lifecycle.replicas = replicas = SimulatedReplicas(
            self._model,
            self.info.layout,
            self._memory,
            self._lifecycle.residency.allocator,
            self._wire,
            random.Random(self._rng.getrandbits(64)),
            self.draws,
            min_free=min_free_blocks(self.info.total_blocks),
            on_freed=self._wake,
        )
        return replicas

    def keep(self, key: EngineKey, replica: ReplicaKey) -> None:
        self._shared.require_alive()
        self._lifecycle.set_kept_as(key, replica)

    def promote(self, request: EngineRequest, replica: ReplicaKey, held_tokens: int) -> None:
        self._shared.require_alive()
        self.info.require_servable(request)
        self.info.require_held_tokens(request, held_tokens)
        self._lifecycle.promote(request, replica, held_tokens)
        self.draws.let_go.pop(request.key.request_id, None)

    def _wake_copier(self) -> None:
        if self._shared.closing or not self._copier.has_copies:
            return
        loop = asyncio.get_running_loop()
        if self._next_copy is not None and self._next_copy.when() > loop.time() + self._step_s:
            # It only looks at time limits.
            self._next_copy.cancel()
            self._next_copy = None
        if self._next_copy is None:
            delay_s = self._rng.random() * self._step_s
            self._next_copy = loop.call_later(delay_s, self._copy, context=self._context)

    def _copy(self) -> None:
        self._next_copy = None
        while not self._shared.closing and self._copier.advance():
            pass
        self._shared.publish()
        if (
            self._next_copy is None
            and not self._shared.closing
            and any(copy.release is not None for copy in self._copier._copies.values())
        ):
            # Its time limits pass without an event.
            loop = asyncio.get_running_loop()
            self._next_copy = loop.call_later(_LOOK_EVERY_S, self._copy, context=self._context)

    def _hear(self, event: PlaneEvent) -> None:
        """The engine reports a ticket when it next reads its commands."""
        if isinstance(event, Granted):
            delay_s = self._rng.random() * self._step_s
            loop = asyncio.get_running_loop()
            timer = loop.call_later(delay_s, self._transfers.hear, event, context=self._context)
            self._granted = {each for each in self._granted if each.when() > loop.time()} | {timer}
        else:
            self._transfers.hear(event)

    # Steps.

    def _wake(self) -> None:
        self._woken = True
        if self._next is None and not self._shared.closing and self._shared.listener is not None:
            self._next = asyncio.get_running_loop().call_soon(self._begin_step, context=self._context)

    def _begin_step(self) -> None:
        if self._shared.closing or self._stalled:
            return
        self._shared.turns.turn_count += 1
        self._woken = False
        planned = self._lifecycle.plan()
        if self._lifecycle.replicas is not None and (wanted_blocks := self._lifecycle.wanted_blocks()) > 0:
            self._lifecycle.replicas.evict(wanted_blocks)
        for sequence, _ in self._lifecycle.last_blocks():
            self._lifecycle.stopped(sequence)
            self._wake_copier()
        if planned:
            step_s = self._step_s * (0.5 + self._rng.random())
            self._shared.stepped(step_s)
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(step_s, self._end_step, planned, context=self._context)
        else:
            self._next = None
            if self._woken:
                # Copies have given blocks back.
                self._wake()
        self._shared.publish()

    def _end_step(self, planned: list[PlannedSlice]) -> None:
        try:
            self._step(planned)
        except StaleKv as error:
            self.draws.report(f"engine {self.info.epoch:x} at {asyncio.get_running_loop().time():.6f}: {error}")
            get_logger().exception("engine_failed", error=repr(error))
            self.fail(repr(error))
            return
        except RequestOfDeath as error:
            get_logger().exception("engine_failed", error=repr(error))
            self._shared.stop(repr(error), self._lifecycle.members(planned))
            return
        self._begin_step()

    def _step(self, planned: list[PlannedSlice]) -> None:
        advances = [
            (sequence.source, sequence.computed + token_count)
            for sequence, token_count in planned
            if sequence.source is not None
        ]
        self._plane.begin_step(advances)
        drawn = [self._compute(sequence.key, sequence.slice(token_count)) for sequence, token_count in planned]
        self._plane.end_step()
        self._shared.turns.computed_tokens += sum(token_count for _, token_count in planned)
        computed, unwanted = self._lifecycle.apply(planned, drawn, self._lifecycle.unmirrored_blocks(planned))
        self._wake_copier()
        # Decode tokens go out once the next step has its blocks: until then free_blocks counts those as free.
        if computed:
            self._shared.publish()
        for source, first_token_id in computed:
            self._plane.hand_over(source, first_token_id)
        for transfer_id in unwanted:
            self._plane.abort_push(transfer_id)

    def _compute(self, key: EngineKey, part: SequenceSlice) -> Drawn:
        self.draws.computed[DrawRun(self.info.epoch, key)] = None
        death = self.draws.deaths.get(key.request_id)
        is_deadly = death is not None and death.at_index == part.draw_index
        if death is not None and is_deadly and not death.in_draw:
            self.draws.deadly_runs.append(DrawRun(self.info.epoch, key))
            raise RequestOfDeath(f"an injected fault at token {death.at_index}")
        try:
            chain = self._memory.write(part)
        except StaleKv as error:
            raise StaleKv(f"{key}: {error}") from error
        if not part.draw:
            return self._memory.scored(part, None)
        if is_deadly:
            return NoToken("its draw raised an injected fault", is_final=True)
        run = DrawRun(self.info.epoch, key)
        salt = seed_salt(part.params) ^ (life_salt(run) if self._divergent else 0)
        drawn = self._memory.drawn(part, chain, salt)
        if isinstance(drawn, NoToken):
            return drawn
        self.draws.add(run, part.draw_index, chain, drawn.token_id)
        return self._memory.scored(part, drawn)

    # The end.

    def _end(self) -> None:
        """Nothing runs and nothing is under way afterwards. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._next_copy is not None:
            self._next_copy.cancel()
            self._next_copy = None
        for timer in self._granted:
            timer.cancel()
        self._copier.close()
        self._transfers.close()
        self._transfers.forget()
        self._lifecycle.clear()
