"""An engine on an asyncio loop, without threads: its steps are timers, so simulated time and seeds decide everything.

Requests, blocks, batches and pushes are the stepwise engine's own code (kaveri/engine/stepwise_*.py, pushes.py). Only
the clock, the pool (kv_memory.py) and the transfers (kv_transfers.py) are simulated.
"""

import asyncio
import contextvars
import random
from concurrent.futures import Future
from dataclasses import dataclass

from kaveri.engine.contract import (
    AttemptKey,
    EngineInfo,
    EngineListener,
    EngineRequest,
    EngineStats,
    EngineStopped,
)
from kaveri.engine.outbox import Outbox
from kaveri.engine.pushes import Pushes
from kaveri.engine.stepwise.batch import PlannedSlice
from kaveri.engine.stepwise.fake import FakeModel, StaleKv
from kaveri.engine.stepwise.lifecycle import Lifecycle
from kaveri.engine.stepwise.runner import DrawnToken, SequenceSlice
from kaveri.errors import ConfigError, EngineError, KaveriError, RequestCancelled
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow
from kaveri.kv.transfer.receiver import TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import Ticket
from kaveri.telemetry.logs import get_logger
from kaveri.testing.simulation.draws import DrawRecord, DrawRun, life_salt, seed_salt
from kaveri.testing.simulation.kv_memory import KvMemory
from kaveri.testing.simulation.kv_transfers import SimulatedReceiver, SimulatedSender
from kaveri.testing.simulation.kv_wire import KvWire


@dataclass(eq=False, slots=True)
class _Grant:
    """A ticket that waits for the engine's next look at its commands."""

    future: "Future[Ticket]"
    timer: asyncio.TimerHandle
    ticket: Ticket


class SimulatedEngine:
    """Both PrefillEngine and DecodeEngine (contract.py), on the running asyncio loop, for its thread only.

    Constructed within its simulated process: timers and callbacks run in the context of the constructor's caller.
    model: must have one layer. Greedy tokens follow FakeModel.answer(); with a temperature they depend on the seed too.
    wire: the KV network. rng: of this life of the engine alone; also gives its epoch.
    step_s: mean seconds of a step; each takes from half of it to one and a half.
    receives: whether it takes pushes.
    divergent: every life draws other tokens from the same prefix, and so does every request of it.
    draws: keeps what is drawn; None: nothing does.
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
        receives: bool,
        divergent: bool = False,
        draws: DrawRecord | None = None,
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
        epoch = rng.getrandbits(63)
        self._memory = KvMemory(model, block_count)
        self._receiver = (
            SimulatedReceiver(self._memory, layout, wire, rng, epoch, self._on_landing) if receives else None
        )
        self._sender = SimulatedSender(self._memory, layout, wire, self._on_push)
        self._pushes = Pushes(self._sender, layout)
        self.info = EngineInfo(
            engine="simulated",
            layout=layout,
            total_blocks=block_count,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset({model.eos_token_id}),
            epoch=epoch,
            kv_endpoints=self._receiver.endpoints if self._receiver is not None else (),
        )
        self.longest_ticket_s = 0.0
        """Of all tickets granted."""
        self._outbox = Outbox(self._on_listener_error)
        self._lifecycle = Lifecycle(self.info, chunk_tokens, max_batch, self._outbox.put, on_work=self._wake)
        self._grants: dict[AttemptKey, _Grant] = {}
        # The step that comes next or is under way; None: there is nothing to do.
        self._next: asyncio.Handle | None = None
        self._stopped: str | None = None

    # Both sides.

    def start(self, listener: EngineListener) -> None:
        self._outbox.listener = listener
        self._wake()

    def close(self) -> None:
        if self._stopped is None:
            self._stopped = "it is closed"
            self._outbox.close()
        self._end()

    def fail(self, reason: str) -> None:
        """An injected fault: the engine breaks, every request is lost, and EngineStopped is the last event."""
        if self._stopped is None:
            self._stopped = reason
            self._outbox.close(EngineStopped(reason))
            self._end()
            self._outbox.publish()

    def stats(self) -> EngineStats:
        return self._lifecycle.stats()

    def kv_flow(self) -> KvFlow:
        receiving = self._receiver.flow() if self._receiver is not None else ReceiverFlow()
        return KvFlow(self._sender.flow(), receiving)

    def abort(self, key: AttemptKey) -> None:
        if self._stopped is not None:
            return
        push_id, landing_id = self._lifecycle.abort(key)
        grant = self._grants.pop(key, None)
        if grant is not None:
            grant.timer.cancel()
            grant.future.set_exception(RequestCancelled(key.request_id))
        if push_id is not None:
            self._pushes.abort(push_id)
        if landing_id is not None and self._receiver is not None:
            self._receiver.revoke(landing_id)
        self._outbox.publish()

    def check_integrity(self) -> None:
        self._lifecycle.check_integrity()

    # The prefill side.

    def prefill(self, request: EngineRequest) -> None:
        self.info.require_servable(request)
        self._require_alive()
        self._lifecycle.open_prefill(request)

    def push_to(self, key: AttemptKey, ticket: Ticket) -> None:
        self.info.layout.require_same(ticket.layout)
        self._require_alive()
        sequence = self._lifecycle.open_push(key, ticket)
        if sequence is not None:
            assert sequence.source is not None
            try:
                self._pushes.open(sequence.source, ticket)
            except KaveriError as error:
                self._lifecycle.end_push(PushFailed(ticket.transfer_id, str(error)))
        self._outbox.publish()

    # The decode side.

    def reserve(self, request: EngineRequest, expires_in_s: float) -> "Future[Ticket]":
        """As the contract. The future is done within a step's time."""
        future: Future[Ticket] = Future()
        # Nothing cancels it but abort().
        future.set_running_or_notify_cancel()
        try:
            ticket = self._reserve(request, expires_in_s)
        except KaveriError as error:
            future.set_exception(error)
        else:
            timer = asyncio.get_running_loop().call_later(
                self._rng.random() * self._step_s, self._grant, request.key, context=self._context
            )
            self._grants[request.key] = _Grant(future, timer, ticket)
        return future

    def adopt(self, key: AttemptKey) -> None:
        self._require_alive()
        self._lifecycle.adopt(key)
        self._outbox.publish()

    def admit(self, key: AttemptKey) -> None:
        self._require_alive()
        self._lifecycle.admit(key)

    def _reserve(self, request: EngineRequest, expires_in_s: float) -> Ticket:
        self.info.require_servable(request)
        if self._receiver is None:
            raise EngineError("this engine takes no pushes")
        self._require_alive()
        self.longest_ticket_s = max(self.longest_ticket_s, expires_in_s)
        transfer_id = self._rng.randbytes(16)
        sequence = self._lifecycle.open_landing(request, transfer_id)
        blocks = sequence.block_ids[: self.info.layout.block_count(len(request.token_ids))]
        return self._receiver.grant(transfer_id, blocks, len(request.token_ids), expires_in_s)

    def _grant(self, key: AttemptKey) -> None:
        grant = self._grants.pop(key)
        grant.future.set_result(grant.ticket)

    # What the transfers tell.

    def _on_push(self, event: PushAccepted | PushFailed) -> None:
        self._lifecycle.end_push(event)
        self._outbox.publish()

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        self._lifecycle.end_landing(event)
        self._outbox.publish()

    # Steps.

    def _wake(self) -> None:
        if self._next is None and self._stopped is None and self._outbox.listener is not None:
            self._next = asyncio.get_running_loop().call_soon(self._begin_step, context=self._context)

    def _begin_step(self) -> None:
        if self._stopped is not None:
            return
        planned = self._lifecycle.plan()
        if planned:
            step_s = self._step_s * (0.5 + self._rng.random())
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(step_s, self._end_step, planned, context=self._context)
        else:
            self._next = None
        self._outbox.publish()

    def _end_step(self, planned: list[PlannedSlice]) -> None:
        try:
            self._step(planned)
        except StaleKv as error:
            self.draws.report(f"engine {self.info.epoch:x} at {asyncio.get_running_loop().time():.6f}: {error}")
            get_logger().exception("the engine stops", error=repr(error))
            self.fail(repr(error))
            return
        self._begin_step()

    def _step(self, planned: list[PlannedSlice]) -> None:
        advances = [
            (sequence.source, sequence.computed + token_count)
            for sequence, token_count in planned
            if sequence.source is not None
        ]
        self._pushes.begin_step(advances)
        drawn = [self._compute(sequence.key, sequence.slice(token_count)) for sequence, token_count in planned]
        self._pushes.end_step()
        computed, unwanted = self._lifecycle.apply(planned, drawn)
        # Decode tokens go out once the next step has its blocks: until then free_blocks counts those as free.
        if computed:
            self._outbox.publish()
        for source, first_token_id in computed:
            self._pushes.hand_over(source, first_token_id)
        for transfer_id in unwanted:
            self._pushes.abort(transfer_id)

    def _compute(self, key: AttemptKey, part: SequenceSlice) -> DrawnToken | None:
        try:
            chain = self._memory.write(part)
        except StaleKv as error:
            raise StaleKv(f"{key}: {error}") from error
        if not part.draw:
            return None
        run = DrawRun(self.info.epoch, key)
        salt = seed_salt(part.params) ^ (life_salt(run) if self._divergent else 0)
        drawn = self._memory.drawn(part, chain, salt)
        self.draws.add(run, part.draw_index, chain, drawn.token_id)
        return drawn

    # The end.

    def _require_alive(self) -> None:
        if self._stopped is not None:
            raise EngineError(self._stopped)

    def _on_listener_error(self, error: Exception) -> None:
        get_logger().error("the engine stops: its listener raised", exc_info=error)
        self.fail(f"the listener raised {error!r}")

    def _end(self) -> None:
        """Nothing runs and nothing is under way afterwards. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        for grant in self._grants.values():
            grant.timer.cancel()
            grant.future.set_exception(EngineError(self._stopped or ""))
        self._grants.clear()
        self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
        self._lifecycle.clear()
