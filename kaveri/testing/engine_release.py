"""Conformance tests for engines that release requests: stop decoding one, for another instance, once that instance's
replica has all its KV. Subclass ReleaseConformance with ReplicationConformance. The replica is in a ReplicaStore;
resuming from it proves that no KV is missing. Not verified: how long a request is stopped."""

from typing import Any

import pytest

from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    FirstToken,
    Landed,
    LetGo,
    ReleaseFailed,
    ReplicaEnded,
    StepTokens,
)
from kaveri.kv.replicas.store import ReplicaDropped, ReplicaKey, ReplicaOrphaned
from kaveri.testing.engine_conformance import MAX_MODEL_LEN, Pair, longest_blocks, make_request, running_pair
from kaveri.testing.engine_recorder import SOON_S, wait_until_free
from kaveri.testing.engine_replication import (
    ReplicaHoldingEngine,
    ReplicationHarness,
    open_holder,
    replica_key,
    wait_until_grown,
)

_TRIES = 5
"""Repetitions of a test whose request may finish before it is released."""


def _drawn(pair: Pair, key: EngineKey) -> list[int]:
    first = pair.prefilled.wait_for(FirstToken, key).token_id
    return [first, *pair.decoded.token_ids.get(key, ())]


def _release(pair: Pair, holder: ReplicaHoldingEngine, request: EngineRequest) -> list[int]:
    """Release the request to the replica's holder; assert that no KV is missing there. Returns its tokens so far."""
    pair.decode.release(request.key, SOON_S)
    let_go = pair.decoded.wait_for(LetGo, request.key)
    drawn = _drawn(pair, request.key)
    tokens = (*request.token_ids, *drawn)
    assert let_go.token_count == len(tokens) - 1
    holder.wait_for(ReplicaOrphaned, request.key)
    assert holder.store.token_ids(replica_key(request.key)) == tokens[:-1]
    return drawn


def _wait_until_released(pair: Pair, key: EngineKey) -> None:
    def is_decided() -> bool:
        told = (*pair.decoded.of(LetGo, key), *pair.decoded.of(ReleaseFailed, key))
        return key in pair.decoded.finished or bool(told)

    pair.decoded.wait_until(is_decided, f"release of {key}")


class ReleaseConformance:
    @pytest.mark.parametrize("place", ["host", "pool"])
    @pytest.mark.parametrize("moment", ["landed", "drawing", "drawing sampled"])
    def test_released_request_goes_on_at_its_holder_with_nothing_computed_again(
        self, harness: ReplicationHarness, moment: str, place: str
    ) -> None:
        params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95} if moment == "drawing sampled" else {}
        with running_pair(harness) as pair:
            block_tokens = pair.decode.info.layout.block_tokens
            # Shorter than a block, at its end and just after it, and longer.
            lengths = (2, block_tokens - 1, block_tokens, 2 * block_tokens + 1, 60)
            requests = [make_request(pair.prefill, f"r{n}", n, 90, **params) for n in lengths]
            for request in requests:
                pair.hand_over(request)
            answers = [pair.answer(request) for request in requests]
        with (
            running_pair(harness) as target,
            running_pair(harness, admit=False) as pair,
            open_holder(harness, target, place=place) as holder,
        ):
            for request in requests:
                holder.begin(pair, request)
            if moment != "landed":
                for request in requests:
                    pair.decode.admit(request.key)
                for request in requests[:3]:
                    pair.decoded.wait_for_tokens(request.key, 3)
            let_go = []
            for request in requests:
                pair.decode.release(request.key, SOON_S)
            for request, answer in zip(requests, answers, strict=True):
                _wait_until_released(pair, request.key)
                if request.key in pair.decoded.finished:
                    continue
                let_go.append(request)
                drawn = _drawn(pair, request.key)
                tokens = (*request.token_ids, *drawn)
                assert pair.decoded.of(LetGo, request.key) == [LetGo(request.key, len(tokens) - 1)]
                holder.wait_for(ReplicaOrphaned, request.key)
                assert holder.store.token_ids(replica_key(request.key)) == tokens[:-1]
                if drawn == answer:
                    continue
                holder.resume(target, request, drawn)
                target.decoded.wait_for_finish(request.key)
                assert drawn + target.decoded.token_ids[request.key] == answer, len(request.token_ids)
            assert let_go, "all have finished before they were released"
            assert not pair.decoded.of(ReleaseFailed)
            wait_until_free(pair.prefill, pair.decode, target.decode)

    def test_request_that_is_let_go_stays_as_a_replica_that_its_next_instance_extends(
        self, harness: ReplicationHarness
    ) -> None:
        with (
            running_pair(harness, admit=False) as target,
            running_pair(harness, admit=False) as pair,
            open_holder(harness, target) as holder,
            open_holder(harness, pair, place="pool") as former,
        ):
            layout, request = pair.decode.info.layout, make_request(pair.prefill, "r", 42, 60)
            kept_tokens = 42 // layout.block_tokens * layout.block_tokens
            holder.begin(pair, request)
            assert former.keeper is not None
            former.keeper.keep(request.key, replica_key(request.key))
            drawn = _release(pair, holder, request)
            (let_go,) = pair.decoded.of(LetGo, request.key)
            assert (let_go.kept_as, let_go.kept_tokens) == (replica_key(request.key), kept_tokens)
            holder.resume(target, request, drawn)
            target.decoded.wait_for(Landed, request.key)
            next_key = ReplicaKey("r", 0, 9)
            ticket = former.store.open(next_key, layout, 43, 60.0, extends=replica_key(request.key))
            assert ticket.first_block * layout.block_tokens == kept_tokens
            target.decode.replicate(request.key, ticket)
            wait_until_grown(target.decoded, request.key, kept_tokens)
            target.decode.admit(request.key)
            target.decoded.wait_for_finish(request.key)
            assert drawn + target.decoded.token_ids[request.key] == harness.answer(request.token_ids, 60)
            former.log.wait_for(ReplicaDropped, lambda event: event.key == next_key)
            wait_until_free(pair.prefill, pair.decode, target.decode)

    def test_others_run_on_while_a_request_is_released(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair) as holder:
            requests = [make_request(pair.prefill, f"r{i}", 30 + i, 60) for i in range(4)]
            for request in requests:
                holder.begin(pair, request)
                pair.decode.admit(request.key)
            pair.decoded.wait_for_tokens(requests[0].key, 2)
            pair.decode.release(requests[0].key, SOON_S)
            for request in requests[1:]:
                assert pair.answer(request) == harness.answer(request.token_ids, 60)
            if requests[0].key not in pair.decoded.finished:
                pair.decoded.wait_for(LetGo, requests[0].key)
            wait_until_free(pair.prefill, pair.decode)

    def test_request_without_a_replica_is_not_released_and_goes_on(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair:
            request = make_request(pair.prefill, "r", 40, 20)
            pair.hand_over(request)
            pair.decoded.wait_for(Landed, request.key)
            pair.decode.release(EngineKey("unknown", 1), SOON_S)
            pair.decode.release(request.key, SOON_S)
            pair.decoded.wait_for(ReleaseFailed, request.key)
            pair.decode.admit(request.key)
            assert pair.answer(request) == harness.answer(request.token_ids, 20)
            wait_until_free(pair.prefill, pair.decode)

    def test_request_goes_on_when_its_holder_does_not_take_all_and_may_be_released_elsewhere(
        self, harness: ReplicationHarness
    ) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair) as other:
            block_tokens = pair.decode.info.layout.block_tokens
            with open_holder(harness, pair, block_count=3) as full:
                request = make_request(pair.prefill, "r", 2 * block_tokens + 1, 50)
                rival = make_request(pair.prefill, "rival", block_tokens - 1, 50)
                for each in (request, rival):
                    pair.hand_over(each)
                    pair.decoded.wait_for(Landed, each.key)
                # The rival has a block, so that one of this request is always missing.
                full.replicate(pair.decode, rival)
                full.replicate(pair.decode, request, block_tokens - 1)
                wait_until_grown(pair.decoded, request.key, block_tokens)
                pair.decode.release(request.key, 0.5)
                pair.decode.release(request.key, SOON_S)
                pair.decoded.wait_for(ReleaseFailed, request.key)
                assert len(pair.decoded.of(ReplicaEnded, request.key)) == 1
                assert len(pair.decoded.of(ReleaseFailed, request.key)) == 1
            assert not pair.decoded.of(LetGo)
            other.replicate(pair.decode, request)
            drawn = _release(pair, other, request)
            assert drawn == harness.answer(request.token_ids, 1)
            pair.decode.admit(rival.key)
            assert pair.answer(rival) == harness.answer(rival.token_ids, 50)
            wait_until_free(pair.prefill, pair.decode)

    def test_request_whose_release_has_failed_draws_the_same_answer(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair:
            block_tokens = pair.decode.info.layout.block_tokens

            def release(event: EngineEvent) -> None:
                # On the thread that reports the token: a fast engine samples all before the test's own thread wakes up.
                for step in event.steps if isinstance(event, StepTokens) else ():
                    if step.index == 2:
                        pair.decode.release(step.key, 0.2)

            pair.decoded.on_event = release
            for number in range(_TRIES):
                request = make_request(pair.prefill, f"r{number}", 2 * block_tokens + 1, 60)
                with open_holder(harness, pair, block_count=1) as full:
                    full.begin(pair, request, block_tokens - 1)
                    pair.decode.admit(request.key)
                    _wait_until_released(pair, request.key)
                assert pair.answer(request) == harness.answer(request.token_ids, 60)
                if pair.decoded.of(ReleaseFailed, request.key):
                    break
            else:
                raise AssertionError("all have finished before they were released")
            wait_until_free(pair.prefill, pair.decode)

    def test_abort_of_a_request_that_is_being_released_frees_all_blocks(self, harness: ReplicationHarness) -> None:
        with running_pair(harness, admit=False) as pair, open_holder(harness, pair, block_count=1) as full:
            block_tokens = pair.decode.info.layout.block_tokens
            request = make_request(pair.prefill, "r", 2 * block_tokens + 1, 60)
            full.begin(pair, request, block_tokens - 1)
            wait_until_grown(pair.decoded, request.key, block_tokens)
            pair.decode.release(request.key, SOON_S)
            pair.decode.abort(request.key)
            pair.prefill.abort(request.key)
            wait_until_free(pair.prefill, pair.decode)
            assert not pair.decoded.of(LetGo)
            assert not pair.decoded.of(ReleaseFailed)

    def test_requests_released_while_blocks_are_short_are_neither_lost_nor_doubled(
        self, harness: ReplicationHarness
    ) -> None:
        _, blocks = longest_blocks(harness)
        with (
            running_pair(harness) as target,
            running_pair(harness, decode_blocks=blocks) as pair,
            open_holder(harness, target) as holder,
        ):
            length = max(1, MAX_MODEL_LEN // 4 - pair.decode.info.layout.block_tokens)
            requests = [make_request(pair.prefill, f"r{i}", length, MAX_MODEL_LEN // 2) for i in range(4)]
            for request in requests:
                holder.begin(pair, request)
            for request in requests:
                pair.decode.release(request.key, SOON_S)
            for request in requests:
                _wait_until_released(pair, request.key)
                answer = harness.answer(request.token_ids, MAX_MODEL_LEN // 2)
                if pair.decoded.of(LetGo, request.key):
                    holder.wait_for(ReplicaOrphaned, request.key)
                    drawn = _drawn(pair, request.key)
                    holder.resume(target, request, drawn)
                    target.decoded.wait_for_finish(request.key)
                    assert drawn + target.decoded.token_ids[request.key] == answer
                else:
                    assert pair.answer(request) == answer
            wait_until_free(pair.prefill, pair.decode, target.decode)
