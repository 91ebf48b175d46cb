"""Conformance tests for engines that copy the KV of running requests to replicas. Subclass ReplicationConformance with
ResumptionConformance. Replicas are in a ReplicaStore; resuming from them proves their content. Not verified: how fast a
replica follows, and stores that break the protocol."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import pytest

from kaveri.engine.contract import (
    DecodeEngine,
    EngineKey,
    EngineRequest,
    FirstToken,
    KeepingEngine,
    KvPushed,
    Landed,
    LetGo,
    Preempted,
    ReplicaEnded,
    Replicated,
    StepTokens,
)
from kaveri.errors import EngineError, InvalidArgument, LayoutMismatch, TransferFailed
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.store import (
    ReplicaDropped,
    ReplicaEvent,
    ReplicaGrew,
    ReplicaKey,
    ReplicaOrphaned,
    ReplicaStore,
)
from kaveri.testing.engine_conformance import (
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    EngineHarness,
    Pair,
    longest_blocks,
    make_request,
    running_pair,
    when_there_is_room,
)
from kaveri.testing.engine_recorder import SOON_S, EngineRecorder, EventLog, wait_until_free

_STORE_BLOCKS = 200
_TRIES = 5
"""Repetitions of a test whose requests may finish before their engine is lost."""


class ReplicationHarness(EngineHarness, Protocol):
    """Factory of engines that replicate, and of stores for their replicas."""

    def replica_store(self, layout: KvLayout, block_count: int) -> ReplicaStore:
        """Create a store of `block_count` KV blocks, not started."""

    def kept_replicas(self, engine: KeepingEngine) -> ReplicaStore:
        """Create the store of an engine that keeps replicas in its pool, not started."""


class ReplicaHoldingEngine:
    """keeper: the engine in whose pool the store is; None: the store has memory of its own."""

    def __init__(self, store: ReplicaStore, keeper: KeepingEngine | None = None) -> None:
        self.store = store
        self.keeper = keeper
        self.log = EventLog()
        store.start(self.log)

    def replicate(self, engine: DecodeEngine, request: EngineRequest, token_count: int | None = None) -> None:
        """Make `engine` copy the request's KV here. token_count: tokens to reserve for at first; None: the prompt's."""
        tokens = len(request.token_ids) if token_count is None else token_count
        engine.replicate(request.key, self.store.open(replica_key(request.key), engine.info.layout, tokens, 60.0))

    def begin(self, pair: Pair, request: EngineRequest, token_count: int | None = None) -> None:
        """Prefill the request, wait until its KV is at the decode engine, and start its replication."""
        pair.hand_over(request)
        pair.decoded.wait_for(Landed, request.key)
        self.replicate(pair.decode, request, token_count)

    def wait_for(self, kind: type[ReplicaEvent], key: EngineKey) -> ReplicaEvent:
        return self.log.wait_for(kind, lambda event: event.key == replica_key(key))

    def watermark(self, key: EngineKey) -> int:
        return self.store.watermark(replica_key(key))

    def resume(self, pair: Pair, request: EngineRequest, drawn: list[int]) -> None:
        """Resume a request on the pair's decode engine from its replica. drawn: tokens sampled so far."""
        self.store.seal(replica_key(request.key))
        token_ids = request.token_ids + tuple(drawn)
        resumed = replace(request, token_ids=token_ids, generated_count=request.generated_count + len(drawn))
        held = self.store.token_ids(replica_key(request.key))
        assert held == token_ids[: len(held)], "the replica's tokens are not the request's"
        block_tokens = self.store.layout.block_tokens
        usable = len(held)
        if usable >= len(token_ids):
            # The tokens of the last steps were not reported.
            usable = (len(token_ids) - 1) // block_tokens * block_tokens
        if self.keeper is not None:
            keeper, key = self.keeper, replica_key(request.key)
            when_there_is_room(lambda: keeper.promote(resumed, key, usable))
            keeper.admit(request.key)
            return
        reserve = partial(pair.decode.reserve, resumed, 60.0, self.store.layout, usable)
        ticket = when_there_is_room(lambda: reserve().result(SOON_S))
        self.store.push(replica_key(request.key), ticket).result(SOON_S)


def replica_key(key: EngineKey) -> ReplicaKey:
    return ReplicaKey(key.request_id, 0, key.serial)


@contextmanager
def open_holder(
    harness: ReplicationHarness, pair: Pair, block_count: int = _STORE_BLOCKS, place: str = "host"
) -> Iterator[ReplicaHoldingEngine]:
    """Open a replica store of `block_count` KV blocks, or in the pool of the pair's decode engine, and close it at the
    end. place: "host" or "pool"; skips the test if the engine cannot keep replicas in its pool."""
    if place == "host":
        holder = ReplicaHoldingEngine(harness.replica_store(pair.decode.info.layout, block_count))
    elif pair.decode.info.can_keep:
        keeper = cast(KeepingEngine, pair.decode)
        holder = ReplicaHoldingEngine(harness.kept_replicas(keeper), keeper)
    else:
        pytest.skip("this engine keeps no replicas in its pool")
    try:
        yield holder
    finally:
        holder.store.close()


def _require_watermarks_behind_tokens(recorder: EngineRecorder, request: EngineRequest) -> list[int]:
    """Assert that the replica's reported token counts rise and stay behind computed tokens. Returns them."""
    computed, watermarks = len(request.token_ids), [0]
    for event in tuple(recorder.events):
        if isinstance(event, StepTokens):
            # Each step computes the token sampled before it.
            computed += sum(step.key == request.key for step in event.steps)
        elif isinstance(event, Replicated) and event.key == request.key:
            assert watermarks[-1] < event.token_count <= computed, f"{event} with {computed} tokens computed"
            watermarks.append(event.token_count)
    return watermarks[1:]


def wait_until_grown(recorder: EngineRecorder, key: EngineKey, token_count: int) -> None:
    def has_grown() -> bool:
        return any(event.token_count >= token_count for event in recorder.of(Replicated, key))

    recorder.wait_until(has_grown, f"replica of {token_count} tokens of {key}")


class ReplicationConformance:
    @pytest.mark.parametrize("place", ["host", "pool"])
    @pytest.mark.parametrize("moment", ["landed", "drawing", "drawing sampled"])
    def test_request_goes_on_from_its_replica_when_its_owner_is_lost(
        self, harness: ReplicationHarness, moment: str, place: str
    ) -> None:
        params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95} if moment == "drawing sampled" else {}
        with running_pair(harness) as survivor:
            block_tokens = survivor.decode.info.layout.block_tokens
            lengths = (block_tokens + 1, 2 * block_tokens - 1, 2 * block_tokens + 1, 60)
            requests = [make_request(survivor.prefill, f"r{n}", n, MAX_MODEL_LEN, **params) for n in lengths]
            for request in requests:
                survivor.hand_over(request)
            answers = [survivor.answer(request) for request in requests]
        for _ in range(_TRIES):
            with (
                running_pair(harness) as survivor,
                running_pair(harness, admit=False) as pair,
                open_holder(harness, survivor, place=place) as holder,
            ):
                for request in requests:
                    holder.begin(pair, request)
                for request in requests:
                    wait_until_grown(pair.decoded, request.key, len(request.token_ids) // block_tokens * block_tokens)
                if moment != "landed":
                    for request in requests:
                        pair.decode.admit(request.key)
                    pair.decoded.wait_for_tokens(requests[0].key, 3)
                pair.decode.close()
                lost = [request for request in requests if request.key not in pair.decoded.finished]
                if not lost:
                    continue
                for request in lost:
                    holder.wait_for(ReplicaOrphaned, request.key)
                    watermarks = _require_watermarks_behind_tokens(pair.decoded, request)
                    assert holder.watermark(request.key) >= watermarks[-1]
                    first = pair.prefilled.wait_for(FirstToken, request.key).token_id
                    drawn = [first, *pair.decoded.token_ids.get(request.key, ())]
                    holder.resume(survivor, request, drawn)
                    survivor.decoded.wait_for_finish(request.key)
                    answer = answers[requests.index(request)]
                    assert drawn + survivor.decoded.token_ids[request.key] == answer, len(request.token_ids)
                wait_until_free(survivor.decode)
                return
        raise AssertionError("each engine has finished all before it was lost")

    def test_block_counts_when_its_last_token_is_computed_not_when_it_is_drawn(
        self, harness: ReplicationHarness
    ) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair) as holder:
            block_tokens = pair.decode.info.layout.block_tokens
            # With the token that prefill samples the request fills three blocks, but that token's KV is not there yet.
            request = make_request(pair.prefill, "r", 3 * block_tokens - 1, block_tokens)
            holder.begin(pair, request)
            wait_until_grown(pair.decoded, request.key, 2 * block_tokens)
            pair.decode.admit(request.key)
            pair.decoded.wait_for_finish(request.key)
            watermarks = _require_watermarks_behind_tokens(pair.decoded, request)
            assert watermarks[0] <= 2 * block_tokens
            assert pair.answer(request) == harness.answer(request.token_ids, block_tokens)
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("end", ["finish", "abort"])
    def test_replica_is_dropped_when_its_request_ends(self, harness: ReplicationHarness, end: str) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair) as holder:
            request = make_request(pair.prefill, "r", 60, 40)
            holder.begin(pair, request)
            holder.wait_for(ReplicaGrew, request.key)
            if end == "abort":
                pair.decode.abort(request.key)
                pair.prefill.abort(request.key)
            else:
                pair.decode.admit(request.key)
                pair.decoded.wait_for_finish(request.key)
            holder.wait_for(ReplicaDropped, request.key)
            wait_until_free(pair.prefill, pair.decode)
            assert not pair.decoded.of(ReplicaEnded), "the request's end says it already"
            assert holder.store.usage().used_bytes == 0

    def test_holder_that_is_gone_is_replaced(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair) as second:
            block_tokens = pair.decode.info.layout.block_tokens
            request = make_request(pair.prefill, "r", 60, 60)
            pair.hand_over(request)
            pair.decoded.wait_for(Landed, request.key)
            with open_holder(harness, pair) as first:
                first.replicate(pair.decode, request)
                wait_until_grown(pair.decoded, request.key, 60 // block_tokens * block_tokens)
            pair.decoded.wait_for(ReplicaEnded, request.key)
            second.replicate(pair.decode, request)
            second.log.wait_for(ReplicaGrew, lambda event: event.token_count == 60 // block_tokens * block_tokens)
            pair.decode.admit(request.key)
            pair.decoded.wait_for_finish(request.key)
            assert pair.answer(request) == harness.answer(request.token_ids, 60)
            wait_until_free(pair.prefill, pair.decode)

    def test_preempted_requests_keep_replicas_that_were_not_being_read(self, harness: ReplicationHarness) -> None:
        _, blocks = longest_blocks(harness)
        with running_pair(harness, decode_blocks=blocks, admit=False) as pair, open_holder(harness, pair) as holder:
            layout = pair.decode.info.layout
            length = max(1, MAX_MODEL_LEN // 4 - layout.block_tokens)
            requests = [make_request(pair.prefill, f"r{i}", length, MAX_MODEL_LEN // 2) for i in range(5)]
            replicate = partial(holder.replicate, pair.decode)
            pair.land_then_admit(requests[:4], replicate)
            pair.land_then_admit(requests[4:], replicate)
            for request in requests:
                assert pair.answer(request) == harness.answer(request.token_ids, MAX_MODEL_LEN // 2)
                _require_watermarks_behind_tokens(pair.decoded, request)
            assert pair.decoded.of(Preempted), "the pool was meant to be too small"
            assert len(ended := pair.decoded.of(ReplicaEnded)) <= len(pair.decoded.of(Preempted))
            assert all("preempted" in each.reason for each in ended)
            wait_until_free(pair.prefill, pair.decode)

    def test_replicas_in_the_pool_give_way_to_requests(self, harness: ReplicationHarness) -> None:
        _, blocks = longest_blocks(harness)
        with (
            running_pair(harness, decode_blocks=2 * blocks) as target,
            running_pair(harness, admit=False) as pair,
            open_holder(harness, target, place="pool") as holder,
        ):
            length = MAX_MODEL_LEN // 2
            copied = [make_request(pair.prefill, f"copied-{n}", length, 20) for n in range(2)]
            for request in copied:
                holder.begin(pair, request)
                wait_until_grown(pair.decoded, request.key, length)
            assert target.decode.stats().free_blocks == 2 * blocks, "blocks of replicas count as free"
            requests = [make_request(target.prefill, f"r{n}", length + n, MAX_MODEL_LEN // 2 - 10) for n in range(2)]
            for request in requests:
                target.hand_over(request)
            for request in requests:
                answer = harness.answer(request.token_ids, MAX_MODEL_LEN // 2 - 10)
                assert target.answer(request) == answer
            holder.wait_for(ReplicaDropped, copied[0].key)
            pair.decoded.wait_for(ReplicaEnded, copied[0].key)
            for request in copied:
                pair.decode.admit(request.key)
                assert pair.answer(request) == harness.answer(request.token_ids, 20)
            wait_until_free(pair.prefill, pair.decode, target.decode)

    def test_promotion_that_is_refused_leaves_the_replica(self, harness: ReplicationHarness) -> None:
        with (
            running_pair(harness) as target,
            running_pair(harness, admit=False) as pair,
            open_holder(harness, target, place="pool") as holder,
        ):
            keeper, request = holder.keeper, make_request(pair.prefill, "r", 42, 20)
            assert keeper is not None
            holder.begin(pair, request)
            held_tokens = 42 // holder.store.layout.block_tokens * holder.store.layout.block_tokens
            holder.log.wait_for(ReplicaGrew, lambda event: event.token_count == held_tokens)
            with pytest.raises(TransferFailed, match="still received"):
                keeper.promote(request, replica_key(request.key), held_tokens)
            holder.store.seal(replica_key(request.key))
            with pytest.raises(TransferFailed, match="gone"):
                keeper.promote(request, ReplicaKey("unknown", 0, 1), held_tokens)
            with pytest.raises(TransferFailed, match=f"{held_tokens} tokens"):
                keeper.promote(request, replica_key(request.key), held_tokens + 1)
            with pytest.raises(InvalidArgument) as raised:
                keeper.promote(request, replica_key(request.key), 42)
            assert raised.value.field == "held_tokens"
            assert holder.watermark(request.key) == held_tokens
            drawn = [pair.prefilled.wait_for(FirstToken, request.key).token_id]
            pair.decode.close()
            holder.resume(target, request, drawn)
            target.decoded.wait_for_finish(request.key)
            assert drawn + target.decoded.token_ids[request.key] == harness.answer(request.token_ids, 20)
            wait_until_free(target.decode)

    def test_prompt_that_is_kept_where_it_was_computed_is_extended_and_goes_on_there(
        self, harness: ReplicationHarness
    ) -> None:
        with running_pair(harness, admit=False) as pair:
            if not pair.prefill.info.can_keep or pair.prefill.info.layout != pair.decode.info.layout:
                pytest.skip("the prefill engine keeps no prompts for this decode engine")
            keeper, layout = cast(KeepingEngine, pair.prefill), pair.decode.info.layout
            holder = ReplicaHoldingEngine(harness.kept_replicas(keeper), keeper)
            request = make_request(pair.prefill, "r", 42, 60)
            key, kept_tokens = replica_key(request.key), 42 // layout.block_tokens * layout.block_tokens
            when_there_is_room(lambda: pair.prefill.prefill(request))
            keeper.keep(EngineKey("unknown", 1), ReplicaKey("unknown", 0, 1))
            keeper.keep(request.key, key)
            pair.prefill.push_to(request.key, pair.reserve(request))
            pushed = pair.prefilled.wait_for(KvPushed, request.key)
            assert (pushed.kept_as, pushed.kept_tokens) == (key, kept_tokens)
            assert holder.store.token_ids(key) == request.token_ids[:kept_tokens]
            ticket = holder.store.open(key, layout, len(request.token_ids), 60.0, extends=key)
            assert ticket.first_block == kept_tokens // layout.block_tokens, "the prompt is not copied again"
            pair.decode.replicate(request.key, ticket)
            wait_until_grown(pair.decoded, request.key, kept_tokens)
            pair.decoded.wait_for(Landed, request.key)
            pair.decode.release(request.key, SOON_S)
            pair.decoded.wait_for(LetGo, request.key)
            holder.wait_for(ReplicaOrphaned, request.key)
            assert holder.store.token_ids(key) == request.token_ids
            drawn = [pair.prefilled.wait_for(FirstToken, request.key).token_id]
            holder.resume(Pair(pair.prefill, keeper, pair.prefilled, pair.prefilled), request, drawn)
            pair.prefilled.wait_for_finish(request.key)
            assert pair.prefilled.token_ids[request.key] == harness.answer(request.token_ids, 60)
            wait_until_free(pair.prefill, pair.decode)

    def test_full_holder_does_not_hold_the_request_up(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair:
            layout = pair.decode.info.layout
            with open_holder(harness, pair, block_count=2) as holder:
                request = make_request(pair.prefill, "r", layout.block_tokens + 1, 90)
                holder.begin(pair, request)
                holder.wait_for(ReplicaGrew, request.key)
                pair.decode.admit(request.key)
                assert pair.answer(request) == harness.answer(request.token_ids, 90)
                holder.wait_for(ReplicaDropped, request.key)
                wait_until_free(pair.prefill, pair.decode)

    def test_adopted_request_is_replicated(self, harness: ReplicationHarness) -> None:
        engine = harness.decode_engine(
            max_model_len=MAX_MODEL_LEN, total_blocks=200, chunk_tokens=CHUNK_TOKENS, max_batch=4
        )
        holder = ReplicaHoldingEngine(harness.replica_store(engine.info.layout, _STORE_BLOCKS))
        try:
            recorder = EngineRecorder()
            engine.start(recorder)
            request = make_request(engine, "r", 40, 60)
            engine.prefill(request)
            recorder.wait_for(FirstToken, request.key)
            engine.adopt(request.key)
            holder.replicate(engine, request)
            engine.admit(request.key)
            recorder.wait_for_finish(request.key)
            holder.wait_for(ReplicaDropped, request.key)
            assert recorder.token_ids[request.key] == harness.answer(request.token_ids, 60)
            wait_until_free(engine)
        finally:
            engine.close()
            holder.store.close()

    def test_bad_calls_are_refused_by_name_and_the_request_goes_on(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair) as holder:
            assert pair.decode.info.can_replicate
            layout = pair.decode.info.layout
            request = make_request(pair.prefill, "r", 40, 20)
            pair.hand_over(request)
            pair.decoded.wait_for(Landed, request.key)
            ticket = holder.store.open(replica_key(request.key), layout, 40, 60.0)
            unknown = EngineKey("unknown", 1)
            pair.decode.replicate(unknown, holder.store.open(replica_key(unknown), layout, 40, 60.0))
            holder.wait_for(ReplicaDropped, unknown)
            foreign = replace(ticket, layout=replace(layout, model_fingerprint="another"))
            with pytest.raises(LayoutMismatch):
                pair.decode.replicate(request.key, foreign)
            with pytest.raises(InvalidArgument) as raised:
                pair.decode.replicate(request.key, replace(ticket, is_open=False))
            assert raised.value.field == "ticket.is_open"
            pair.decode.replicate(request.key, ticket)
            other = holder.store.open(ReplicaKey("other", 0, 1), layout, 40, 60.0)
            with pytest.raises(InvalidArgument) as raised:
                pair.decode.replicate(request.key, other)
            assert raised.value.field == "ticket"
            holder.wait_for(ReplicaGrew, request.key)
            pair.decode.admit(request.key)
            pair.decoded.wait_for_finish(request.key)
            assert pair.answer(request) == harness.answer(request.token_ids, 20)
            pair.decode.close()
            with pytest.raises(EngineError):
                pair.decode.replicate(request.key, other)
