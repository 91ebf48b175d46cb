"""Conformance tests for every engine. Subclass EngineConformance in a test module and provide a `harness` fixture.
Checks an engine against kaveri/engine/contract.py: tokens, order of events, KV blocks, limits. Not verified: speed,
overlap of KV pushes with computation, and peers that die or break the protocol (see the transport suite)."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import pytest

from kaveri.domain.sampling import FinishReason, ResolvedParams
from kaveri.engine.contract import (
    MAX_SCORED_TOKENS,
    DecodeEngine,
    Engine,
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStats,
    FirstToken,
    KvPushed,
    KvPushFailed,
    Landed,
    LandingFailed,
    Preempted,
    PrefillEngine,
    PrefillProgress,
    PrefillStarted,
    PromptLogprobs,
    RequestFailed,
    StepTokens,
)
from kaveri.errors import EngineError, InvalidArgument, LayoutMismatch, NoCapacity, RequestAlreadyExists
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.engine_recorder import SOON_S, EngineRecorder, wait_until_free, wait_until_idle

ResultT = TypeVar("ResultT")

MAX_MODEL_LEN = 128
CHUNK_TOKENS = 16
_ABUNDANT_BLOCKS = 400
_EOS_PROMPTS = 300
"""Max prompts tried to find an answer with an end-of-sequence id."""


class EngineHarness(Protocol):
    """Factory of the engines under test. Engines must be able to exchange KV, with at most 32 tokens per block; the
    model must have an end-of-sequence id and sample it in some answers."""

    def prefill_engine(self, *, max_model_len: int, total_blocks: int, chunk_tokens: int) -> PrefillEngine:
        """Create a prefill engine, not started."""

    def decode_engine(
        self, *, max_model_len: int, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> "TwoSidedEngine":
        """Create a decode engine, not started. One test uses it for prefill too (adopt())."""

    def answer(self, token_ids: Sequence[int], token_count: int) -> list[int]:
        """Return the next `token_count` tokens after the prompt, sampled greedily and past end-of-sequence ids.
        Computed without the engine under test. Prompt and answer have at most MAX_MODEL_LEN tokens."""


@dataclass
class Pair:
    prefill: PrefillEngine
    decode: DecodeEngine
    prefilled: EngineRecorder
    decoded: EngineRecorder

    def reserve(self, request: EngineRequest, expires_in_s: float = 60.0) -> Ticket:
        """Reserve blocks for a KV push at the decode engine, waiting for room. Returns the ticket to push with."""
        return when_there_is_room(
            lambda: self.decode.reserve(request, expires_in_s, self.prefill.info.layout).result(SOON_S)
        )

    def hand_over(self, request: EngineRequest) -> None:
        """Reserve blocks at the decode engine, then prefill the request and push its KV there."""
        ticket = self.reserve(request)
        when_there_is_room(lambda: self.prefill.prefill(request))
        self.prefill.push_to(request.key, ticket)

    def land_then_admit(
        self, requests: Sequence[EngineRequest], landed: Callable[[EngineRequest], object] = lambda request: None
    ) -> None:
        """Push the KV of all requests before any starts to decode, so that together they fill the pool even if this
        thread is slow. Needs a pair with admit=False. landed: called with each request whose KV has arrived."""
        for request in requests:
            self.hand_over(request)
            self.decoded.wait_for(Landed, request.key)
            landed(request)
        for request in requests:
            self.decode.admit(request.key)

    def answer(self, request: EngineRequest) -> list[int]:
        """Wait for the request's end. Returns all its tokens: the first is the prefill engine's."""
        first = self.prefilled.wait_for(FirstToken, request.key)
        if first.finish is not None:
            return [first.token_id]
        self.decoded.wait_for_finish(request.key)
        return [first.token_id, *self.decoded.token_ids[request.key]]

    def run(self, request: EngineRequest) -> list[int]:
        """Hand the request over and wait for its end. Returns all its tokens."""
        self.hand_over(request)
        return self.answer(request)


def when_there_is_room(call: Callable[[], ResultT]) -> ResultT:
    """Repeat `call` until it no longer raises NoCapacity; return its result."""
    give_up_at_s = time.monotonic() + SOON_S
    while True:
        try:
            return call()
        except NoCapacity:
            assert time.monotonic() < give_up_at_s, f"no room after {SOON_S} s"
            threading.Event().wait(0.002)


def finish_when_there_is_room(engine: PrefillEngine, recorder: EngineRecorder, request: EngineRequest) -> list[int]:
    """Wait until a request has finished and return its tokens; submit it again each time it fails (RequestFailed)."""
    key = request.key
    recorder.wait_until(lambda: key in recorder.finished or bool(recorder.of(RequestFailed, key)), f"end of {key}")
    if key in recorder.finished:
        return recorder.token_ids[key]
    again = replace(request, key=key._replace(serial=key.serial + 1))
    when_there_is_room(partial(engine.prefill, again))
    return finish_when_there_is_room(engine, recorder, again)


@contextmanager
def running_pair(
    harness: EngineHarness,
    *,
    prefill_blocks: int = _ABUNDANT_BLOCKS,
    decode_blocks: int = _ABUNDANT_BLOCKS,
    max_model_len: int = MAX_MODEL_LEN,
    max_batch: int = 8,
    admit: bool = True,
) -> Iterator[Pair]:
    """Start a prefill and a decode engine; close them at the end. admit: decode requests once their KV arrives."""
    with ExitStack() as stack:
        prefill = harness.prefill_engine(
            max_model_len=max_model_len, total_blocks=prefill_blocks, chunk_tokens=CHUNK_TOKENS
        )
        stack.callback(prefill.close)
        decode = harness.decode_engine(
            max_model_len=max_model_len, total_blocks=decode_blocks, chunk_tokens=CHUNK_TOKENS, max_batch=max_batch
        )
        stack.callback(decode.close)
        # A request that ends with its first token needs no room: the caller that placed it releases it.
        give_back = partial(_abort_when_finished, decode)
        pair = Pair(
            prefill, decode, EngineRecorder(on_event=give_back), EngineRecorder(admit_to=decode if admit else None)
        )
        prefill.start(pair.prefilled)
        decode.start(pair.decoded)
        yield pair


def longest_blocks(harness: EngineHarness) -> tuple[int, int]:
    """Return how many KV blocks a request of MAX_MODEL_LEN tokens takes at the prefill and the decode engine."""
    with running_pair(harness) as pair:
        prefill, decode = (engine.info.layout.block_count(MAX_MODEL_LEN) for engine in (pair.prefill, pair.decode))
    return prefill, decode


def _abort_when_finished(decode: DecodeEngine, event: EngineEvent) -> None:
    if isinstance(event, FirstToken) and event.finish is not None:
        decode.abort(event.key)


def make_request(
    engine: Engine, name: str, prompt_tokens: int, max_tokens: int, seed: int = 0, **params: object
) -> EngineRequest:
    """Make a greedy request; its prompt is random, but fixed by `name` and `seed`. params: more sampling parameters."""
    rng = random.Random(f"{name}-{seed}")
    token_ids = tuple(rng.randrange(engine.info.vocab_size) for _ in range(prompt_tokens))
    wanted = ResolvedParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "seed": 1, "ignore_eos": True} | params  # type: ignore[arg-type]
    )
    return EngineRequest(EngineKey(name, 1), token_ids, 0, wanted)


def with_params(request: EngineRequest, name: str, **params: Any) -> EngineRequest:
    """Return the request with other sampling parameters, and `name` as its id."""
    changed = replace(request.params, **params)
    return replace(request, key=EngineKey(name, 1), params=changed)


def request_that_draws(
    harness: EngineHarness, engine: Engine, token_ids: frozenset[int]
) -> tuple[EngineRequest, list[int], int]:
    """Find a request whose answer contains one of `token_ids`. Returns the request, its answer, and the index of the
    first such token in it, which is neither its first nor its last."""
    for number in range(_EOS_PROMPTS):
        request = make_request(engine, f"eos{number}", 5, 30)
        whole = harness.answer(request.token_ids, 30)
        found = [index for index, token_id in enumerate(whole) if token_id in token_ids]
        if found and 0 < found[0] < 29:
            return request, whole, found[0]
    raise AssertionError(f"none of {_EOS_PROMPTS} answers has an end-of-sequence id in it")


class TwoSidedEngine(PrefillEngine, DecodeEngine, Protocol):
    """Engine for both prefill and decode."""


def adopting(engine: TwoSidedEngine) -> Callable[[EngineEvent], None]:
    """Return an engine listener that makes the engine decode each request that it has prefilled itself (adopt())."""

    def adopt(event: EngineEvent) -> None:
        if isinstance(event, FirstToken) and event.finish is None:
            engine.adopt(event.key)
            engine.admit(event.key)

    return adopt


class EngineConformance:
    # Tokens.

    def test_answers_are_exact_for_prompts_off_the_block_and_chunk_size(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            lengths = (1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 90)
            requests = [make_request(pair.prefill, f"r{length}", length, 12) for length in lengths]
            for request in requests:
                pair.hand_over(request)
            for request in requests:
                assert pair.answer(request) == harness.answer(request.token_ids, 12), len(request.token_ids)
            wait_until_free(pair.prefill, pair.decode)

    def test_request_of_an_earlier_attempt_goes_on_with_its_next_token(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 21, 20)
            whole = harness.answer(request.token_ids, 20)
            resumed = replace(request, token_ids=request.token_ids + tuple(whole[:7]), generated_count=7)
            pair.hand_over(resumed)
            assert pair.answer(resumed) == whole[7:]

    def test_sampled_tokens_depend_on_the_seed_and_not_on_the_company(self, harness: EngineHarness) -> None:
        answers = []
        for company in (0, 5):
            with running_pair(harness) as pair:
                others = [make_request(pair.prefill, f"other{i}", 9 * i + 5, 30) for i in range(company)]
                request = make_request(pair.prefill, "r", 27, 15, temperature=1.0, top_p=0.95, seed=11)
                for each in (*others, request):
                    pair.hand_over(each)
                answers.append(pair.answer(request))
        assert answers[0] == answers[1]

    def test_max_tokens_one_ends_with_the_first_token_and_the_push_is_dropped(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 60, 1)
            ticket = pair.reserve(request)

            def push_at_first_chunk(event: EngineEvent) -> None:
                if isinstance(event, PrefillProgress):
                    pair.prefill.push_to(request.key, ticket)
                    pair.prefilled.on_event = None

            pair.prefilled.on_event = push_at_first_chunk
            pair.prefill.prefill(request)
            first = pair.prefilled.wait_for(FirstToken, request.key)
            assert (first.token_id, first.finish) == (harness.answer(request.token_ids, 1)[0], FinishReason.LENGTH)
            pair.decoded.wait_for(LandingFailed, request.key)
            wait_until_free(pair.prefill, pair.decode)
            assert not pair.prefilled.of(KvPushed) + pair.prefilled.of(KvPushFailed)

    @pytest.mark.parametrize("index", [0, 5])
    def test_stop_token_ends_the_answer(self, harness: EngineHarness, index: int) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 19, 40)
            whole = harness.answer(request.token_ids, 40)
            stop = whole[index]
            params = replace(request.params, stop_token_ids=(stop,))
            request = replace(request, params=params)
            pair.hand_over(request)
            assert pair.answer(request) == whole[: whole.index(stop) + 1]
            finished = pair.prefilled.finished if whole.index(stop) == 0 else pair.decoded.finished
            assert finished[request.key] is FinishReason.STOP
            wait_until_free(pair.prefill, pair.decode)

    def test_end_of_sequence_ends_the_answer_unless_it_is_ignored(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            eos_token_ids = pair.decode.info.eos_token_ids
            assert eos_token_ids == pair.prefill.info.eos_token_ids
            request, whole, end = request_that_draws(harness, pair.prefill, eos_token_ids)
            # Prefill samples the first token, decode the others.
            first = replace(request, token_ids=request.token_ids + tuple(whole[:end]), generated_count=end)
            for name, placed, expected in (("later", request, whole), ("first", first, whole[end:])):
                for ignores in (True, False):
                    params = replace(request.params, ignore_eos=ignores)
                    asked = replace(placed, key=EngineKey(f"{name}-{ignores}", 1), params=params)
                    pair.hand_over(asked)
                    ended = expected if ignores else expected[: expected.index(whole[end]) + 1]
                    assert pair.answer(asked) == ended
                    recorder = pair.prefilled if len(ended) == 1 else pair.decoded
                    assert recorder.finished[asked.key] is (FinishReason.LENGTH if ignores else FinishReason.STOP)
            wait_until_free(pair.prefill, pair.decode)

    # Chunks and pushes.

    def test_prompts_are_computed_in_order_and_in_chunks(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            requests = [make_request(pair.prefill, f"r{i}", length, 1) for i, length in enumerate((70, 3, 5, 40, 1))]
            for request in requests:
                pair.prefill.prefill(request)
            for request in requests:
                pair.prefilled.wait_for_finish(request.key)
            keys = [request.key for request in requests]
            assert [event.key for event in pair.prefilled.of(PrefillStarted)] == keys
            assert [event.key for event in pair.prefilled.of(FirstToken)] == keys
            computed = [event.computed_tokens for event in pair.prefilled.of(PrefillProgress, keys[0])]
            steps = [after - before for before, after in zip([0, *computed], [*computed, 70], strict=True)]
            assert len(steps) >= 70 / CHUNK_TOKENS
            assert all(0 < step <= CHUNK_TOKENS for step in steps), steps

    @pytest.mark.parametrize("prompt_tokens", [1, 2, CHUNK_TOKENS, CHUNK_TOKENS + 1, 75])
    def test_prompt_logprobs_come_in_order_before_the_first_token(
        self, harness: EngineHarness, prompt_tokens: int
    ) -> None:
        with running_pair(harness) as pair:
            plain = make_request(pair.prefill, "plain", 40, 4)
            request = make_request(pair.prefill, "r", prompt_tokens, 4, prompt_logprobs=2)
            for each in (plain, request):
                pair.hand_over(each)
            assert pair.answer(request) == harness.answer(request.token_ids, 4)
            events = [event for event in pair.prefilled.events if isinstance(event, PromptLogprobs | FirstToken)]
            events = [event for event in events if event.key == request.key]
            assert isinstance(events.pop(), FirstToken)
            place = 1
            for event in events:
                assert isinstance(event, PromptLogprobs)
                assert event.first == place
                assert 0 < len(event.entries) <= MAX_SCORED_TOKENS
                place += len(event.entries)
                for entry in event.entries:
                    assert entry.logprob <= 0
                    assert len({token_id for token_id, _ in entry.top}) == 2
                    assert entry.top[0][1] >= entry.top[1][1]
            assert place == prompt_tokens
            pair.answer(plain)
            assert not pair.prefilled.of(PromptLogprobs, plain.key)
            wait_until_free(pair.prefill, pair.decode)

    def test_a_prompt_has_the_same_logprobs_again_and_a_later_attempt_none(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            first = make_request(pair.prefill, "r", 50, 4, prompt_logprobs=0)
            # The same prompt, whose KV an engine may have kept.
            again = replace(first, key=EngineKey("again", 1))
            later = replace(first, key=EngineKey("later", 1), generated_count=1)
            for each in (first, again, later):
                pair.hand_over(each)
                pair.answer(each)
            entries = [
                [entry.logprob for event in pair.prefilled.of(PromptLogprobs, each.key) for entry in event.entries]
                for each in (first, again, later)
            ]
            assert len(entries[0]) == 49
            assert entries[0] == pytest.approx(entries[1], abs=1e-4)
            assert entries[2] == []

    @pytest.mark.parametrize("moment", ["submitted", "first chunk", "first token"])
    def test_ticket_may_come_at_any_moment_of_prefill(self, harness: EngineHarness, moment: str) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 75, 9)
            pair.prefill.prefill(request)
            if moment == "first chunk":
                pair.prefilled.wait_for(PrefillProgress, request.key)
            if moment == "first token":
                pair.prefilled.wait_for(FirstToken, request.key)
                # The KV waits for its ticket.
                held = pair.prefill.info.total_blocks - pair.prefill.stats().free_blocks
                assert held >= pair.prefill.info.layout.block_count(75)
                pair.prefill.check_integrity()
            pair.prefill.push_to(request.key, pair.reserve(request))
            assert pair.answer(request) == harness.answer(request.token_ids, 9)
            pushed, landed = pair.prefilled.wait_for(KvPushed, request.key), pair.decoded.of(Landed)[0]
            assert pushed.kv_bytes == landed.kv_bytes > 0
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("prompt_tokens", [1, 100])
    def test_failed_push_keeps_the_kv_for_another_ticket(self, harness: EngineHarness, prompt_tokens: int) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", prompt_tokens, 8)
            refused = replace(request, key=EngineKey("refused", 1))
            ticket = pair.reserve(refused)
            pair.decode.abort(refused.key)
            pair.prefill.prefill(request)
            pair.prefill.push_to(request.key, ticket)
            pair.prefilled.wait_for(KvPushFailed, request.key)
            pair.prefill.push_to(request.key, pair.reserve(request))
            assert pair.answer(request) == harness.answer(request.token_ids, 8)
            wait_until_free(pair.prefill, pair.decode)

    def test_adopted_request_is_decoded_where_it_was_prefilled(self, harness: EngineHarness) -> None:
        engine = harness.decode_engine(
            max_model_len=MAX_MODEL_LEN, total_blocks=_ABUNDANT_BLOCKS, chunk_tokens=CHUNK_TOKENS, max_batch=4
        )
        with ExitStack() as stack:
            stack.callback(engine.close)
            recorder = EngineRecorder(on_event=adopting(engine))
            engine.start(recorder)
            requests = [
                replace(make_request(engine, f"r{length}-{stays}", length, 20), stays=stays)
                for length in (1, 16, 17, 40, 63)
                for stays in (False, True)
            ]
            for request in requests:
                engine.prefill(request)
            for request in requests:
                recorder.wait_for_finish(request.key)
                assert recorder.token_ids[request.key] == harness.answer(request.token_ids, 20), len(request.token_ids)
            wait_until_free(engine)
            # Each prompt token is computed once, and all but the last token of each answer.
            assert engine.stats().computed_tokens == sum(len(request.token_ids) + 19 for request in requests)

    @pytest.mark.parametrize("tokens", [4, 20])
    @pytest.mark.parametrize("then", ["adopted", "pushed", "aborted"])
    def test_request_that_stays_tells_of_no_token_before_its_admission(
        self, harness: EngineHarness, tokens: int, then: str
    ) -> None:
        with ExitStack() as stack:
            make = partial(
                harness.decode_engine, max_model_len=MAX_MODEL_LEN, chunk_tokens=CHUNK_TOKENS, total_blocks=40
            )
            engine, other = make(max_batch=4), make(max_batch=4)
            recorder, moved = EngineRecorder(), EngineRecorder(admit_to=other)
            for each, listener in ((engine, recorder), (other, moved)):
                stack.callback(each.close)
                each.start(listener)
            # Both fill their blocks: the next token needs another one.
            request = replace(make_request(engine, "r", 32, tokens), stays=True)
            neighbour = replace(make_request(engine, "neighbour", 32, 30), stays=True)
            for asked in (request, neighbour):
                engine.prefill(asked)
            for asked in (request, neighbour):
                recorder.wait_for(FirstToken, asked.key)
            engine.adopt(neighbour.key)
            engine.admit(neighbour.key)
            recorder.wait_for_finish(neighbour.key)
            assert recorder.token_ids[neighbour.key] == harness.answer(neighbour.token_ids, 30)
            (first,) = recorder.token_ids[request.key]
            engine.check_integrity()
            if then == "adopted":
                engine.adopt(request.key)
                engine.admit(request.key)
                recorder.wait_for_finish(request.key)
                assert recorder.token_ids[request.key] == harness.answer(request.token_ids, tokens)
                assert engine.stats().computed_tokens == 32 + tokens - 1 + 32 + 29
            elif then == "pushed":
                engine.push_to(request.key, other.reserve(request, SOON_S, engine.info.layout).result(SOON_S))
                moved.wait_for_finish(request.key)
                assert [first, *moved.token_ids[request.key]] == harness.answer(request.token_ids, tokens)
            else:
                engine.abort(request.key)
            wait_until_free(engine, other)

    def test_adoption_is_the_way_out_where_prompts_hold_the_blocks_that_answers_need(
        self, harness: EngineHarness
    ) -> None:
        _, blocks = longest_blocks(harness)
        engine = harness.decode_engine(
            max_model_len=MAX_MODEL_LEN, total_blocks=blocks, chunk_tokens=CHUNK_TOKENS, max_batch=4
        )
        with ExitStack() as stack:
            stack.callback(engine.close)
            recorder = EngineRecorder(on_event=adopting(engine))
            engine.start(recorder)
            requests = [make_request(engine, f"r{i}", MAX_MODEL_LEN // 3, MAX_MODEL_LEN // 2) for i in range(5)]
            requests = [replace(request, stays=number % 2 > 0) for number, request in enumerate(requests)]
            for request in requests:
                when_there_is_room(partial(engine.prefill, request))
            for request in requests:
                token_ids = finish_when_there_is_room(engine, recorder, request)
                assert token_ids == harness.answer(request.token_ids, MAX_MODEL_LEN // 2)
            assert recorder.of(Preempted), "there was room for all: the test has shown nothing"
            wait_until_free(engine)

    def test_ticket_of_another_layout_is_refused(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 10, 5)
            ticket = pair.reserve(request)
            pair.prefill.prefill(request)
            foreign = replace(ticket, layout=replace(ticket.layout, model_fingerprint="another"))
            with pytest.raises(LayoutMismatch) as raised:
                pair.prefill.push_to(request.key, foreign)
            assert raised.value.field == "model_fingerprint"
            pair.prefill.push_to(request.key, ticket)
            assert pair.answer(request) == harness.answer(request.token_ids, 5)

    # Aborts.

    @pytest.mark.parametrize("moment", ["submitted", "first chunk", "first token", "pushing", "twice"])
    def test_abort_on_the_prefill_side_frees_all_blocks(self, harness: EngineHarness, moment: str) -> None:
        with running_pair(harness) as pair:
            requests = [make_request(pair.prefill, f"r{i}", 100, 8) for i in range(3)]
            for request in requests:
                pair.prefill.prefill(request)
            for request in requests:
                if moment == "first chunk":
                    pair.prefilled.wait_for(PrefillProgress, request.key)
                if moment == "first token":
                    pair.prefilled.wait_for(FirstToken, request.key)
                if moment == "pushing":
                    pair.prefill.push_to(request.key, pair.reserve(request))
                pair.prefill.abort(request.key)
                pair.prefill.check_integrity()
                if moment == "twice":
                    pair.prefill.abort(request.key)
                # A push accepted before the abort has landed, and is aborted by the caller that placed it.
                pair.decode.abort(request.key)
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("moment", ["reserved", "pushing", "landed", "decoding"])
    def test_abort_on_the_decode_side_frees_all_blocks(self, harness: EngineHarness, moment: str) -> None:
        with running_pair(harness, admit=False) as pair:
            requests = [make_request(pair.prefill, f"r{i}", 60, 60) for i in range(3)]
            for request in requests:
                ticket = pair.reserve(request)
                if moment != "reserved":
                    pair.prefill.prefill(request)
                    pair.prefill.push_to(request.key, ticket)
                if moment in ("landed", "decoding"):
                    pair.decoded.wait_for(Landed, request.key)
                if moment == "decoding":
                    pair.decode.admit(request.key)
                    pair.decoded.wait_for_tokens(request.key, 1)
                pair.decode.abort(request.key)
                pair.decode.check_integrity()
                pair.prefill.abort(request.key)
            wait_until_free(pair.prefill, pair.decode)

    def test_unknown_requests_are_ignored(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            unknown = EngineKey("unknown", 1)
            ticket = pair.reserve(make_request(pair.prefill, "r", 10, 5))
            pair.prefill.abort(unknown)
            pair.decode.abort(unknown)
            pair.decode.admit(unknown)
            pair.prefill.push_to(unknown, ticket)
            assert pair.prefilled.events == pair.decoded.events == []

    # Memory.

    def test_preempted_requests_lose_no_token(self, harness: EngineHarness) -> None:
        _, blocks = longest_blocks(harness)
        with running_pair(harness, decode_blocks=blocks, admit=False) as pair:
            layout = pair.decode.info.layout
            # Each prompt takes a quarter of the pool at most, each answer two more.
            length = max(1, MAX_MODEL_LEN // 4 - layout.block_tokens)
            requests = [make_request(pair.prefill, f"r{i}", length, MAX_MODEL_LEN // 2) for i in range(5)]
            pair.land_then_admit(requests[:4])
            pair.land_then_admit(requests[4:])
            for request in requests:
                assert pair.answer(request) == harness.answer(request.token_ids, MAX_MODEL_LEN // 2)
            assert pair.decoded.of(Preempted), "the pool was meant to be too small"
            wait_until_free(pair.prefill, pair.decode)

    def test_a_block_that_the_next_token_takes_is_not_free(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            layout, total_blocks = pair.decode.info.layout, pair.decode.info.total_blocks
            request = make_request(pair.prefill, "r", 20, MAX_MODEL_LEN - 30)
            missing: list[str] = []

            def look(event: EngineEvent) -> None:
                if isinstance(event, StepTokens) and event.steps[0].finish is None:
                    next_tokens = len(request.token_ids) + event.steps[0].index + 1
                    taken = total_blocks - pair.decode.stats().free_blocks
                    if taken < layout.block_count(next_tokens):
                        missing.append(f"{taken} blocks taken where {next_tokens} tokens come next")

            pair.decoded.on_event = look
            pair.hand_over(request)
            pair.decoded.wait_for_finish(request.key)
            assert not missing
            wait_until_free(pair.prefill, pair.decode)

    def test_expired_reservation_releases_its_blocks(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 30, 5)
            ticket = pair.reserve(request, expires_in_s=1.0)
            pair.decoded.wait_for(LandingFailed, request.key)
            wait_until_free(pair.decode)
            pair.prefill.prefill(request)
            pair.prefill.push_to(request.key, ticket)
            pair.prefilled.wait_for(KvPushFailed, request.key)

    def test_full_pools_refuse_and_say_so(self, harness: EngineHarness) -> None:
        prefill_blocks, blocks = longest_blocks(harness)
        with running_pair(harness, prefill_blocks=prefill_blocks, decode_blocks=blocks) as pair:
            big = make_request(pair.prefill, "big", MAX_MODEL_LEN - 10, 5)
            small = make_request(pair.prefill, "small", MAX_MODEL_LEN // 2, 5)
            pair.prefill.prefill(big)
            with pytest.raises(NoCapacity) as raised:
                pair.prefill.prefill(small)
            assert raised.value.role == "prefill"
            pair.decode.reserve(big, 60.0).result(SOON_S)
            with pytest.raises(NoCapacity) as raised:
                pair.decode.reserve(small, 60.0).result(SOON_S)
            assert raised.value.role == "decode"
            pair.prefill.abort(big.key)
            pair.decode.abort(big.key)
            wait_until_free(pair.prefill, pair.decode)
            pair.hand_over(small)
            assert pair.answer(small) == harness.answer(small.token_ids, 5)

    def test_one_request_may_take_the_whole_pool_on_either_side(self, harness: EngineHarness) -> None:
        prefill_blocks, blocks = longest_blocks(harness)
        with running_pair(harness, prefill_blocks=prefill_blocks, decode_blocks=blocks) as pair:
            for name, prompt_tokens in (("prompt", MAX_MODEL_LEN - 2), ("answer", 1), ("longest", MAX_MODEL_LEN - 1)):
                request = make_request(pair.prefill, name, prompt_tokens, MAX_MODEL_LEN)
                pair.hand_over(request)
                assert pair.answer(request) == harness.answer(request.token_ids, MAX_MODEL_LEN - prompt_tokens)
                finished = pair.prefilled.finished if name == "longest" else pair.decoded.finished
                assert finished[request.key] is FinishReason.LENGTH
                wait_until_free(pair.prefill, pair.decode)
            assert not pair.decoded.of(Preempted), "each request was alone"

    def test_requests_that_can_never_fit_are_refused(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            fine = make_request(pair.prefill, "r", 10, 5)
            vocab_size = pair.prefill.info.vocab_size
            for token_ids in ((), (1,) * MAX_MODEL_LEN, (vocab_size,)):
                request = replace(fine, token_ids=token_ids)
                with pytest.raises(InvalidArgument) as raised:
                    pair.prefill.prefill(request)
                assert raised.value.field == "token_ids"
                with pytest.raises(InvalidArgument):
                    pair.decode.reserve(request, 60.0).result(SOON_S)
            unknown = replace(fine, params=replace(fine.params, min_tokens=1, stop_token_ids=(vocab_size,)))
            with pytest.raises(InvalidArgument, match="stop_token_ids"):
                pair.prefill.prefill(unknown)
            with pytest.raises(InvalidArgument, match="stop_token_ids"):
                pair.decode.reserve(unknown, 60.0).result(SOON_S)
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("expires_in_s", [float("nan"), -1.0, 1e9])
    def test_reservation_for_no_duration_is_refused_and_the_engine_goes_on(
        self, harness: EngineHarness, expires_in_s: float
    ) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 10, 5)
            with pytest.raises(InvalidArgument, match="expires_in_s"):
                pair.decode.reserve(request, expires_in_s).result(SOON_S)
            pair.hand_over(request)
            assert pair.answer(request) == harness.answer(request.token_ids, 5)

    def test_request_that_is_live_already_is_refused(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 60, 5)
            pair.prefill.prefill(request)
            with pytest.raises(RequestAlreadyExists):
                pair.prefill.prefill(request)
            ticket = pair.reserve(request)
            with pytest.raises(RequestAlreadyExists):
                pair.decode.reserve(request, 60.0).result(SOON_S)
            pair.prefill.push_to(request.key, ticket)
            assert pair.answer(request) == harness.answer(request.token_ids, 5)

    def test_stats_follow_a_request_through_its_phases(self, harness: EngineHarness) -> None:
        with running_pair(harness, admit=False) as pair:
            request = make_request(pair.prefill, "r", 50, 60)
            ticket = pair.reserve(request)
            reserved = pair.decode.stats()
            assert (reserved.waiting_requests, reserved.running_requests, reserved.context_tokens) == (1, 0, 0)
            assert reserved.free_blocks <= pair.decode.info.total_blocks - pair.decode.info.layout.block_count(51)
            pair.prefill.prefill(request)
            pair.prefilled.wait_for(FirstToken, request.key)
            computed = pair.prefill.stats()
            assert (computed.running_requests, computed.pending_prefill_tokens, computed.context_tokens) == (0, 0, 50)
            pair.prefill.push_to(request.key, ticket)
            pair.decoded.wait_for(Landed, request.key)
            landed = pair.decode.stats()
            assert (landed.waiting_requests, landed.running_requests, landed.context_tokens) == (1, 0, 50)
            running: list[EngineStats] = []

            def look(event: EngineEvent) -> None:
                if isinstance(event, StepTokens):
                    running.append(pair.decode.stats())

            pair.decoded.on_event = look
            pair.decode.admit(request.key)
            pair.decoded.wait_for_finish(request.key)
            assert (running[0].waiting_requests, running[0].running_requests) == (0, 1)
            wait_until_free(pair.prefill, pair.decode)

    def test_steps_are_counted_and_an_engine_with_nothing_to_compute_is_not_busy(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            before = pair.decode.stats().turn_count
            request = make_request(pair.prefill, "r", 50, 10)
            pair.hand_over(request)
            pair.decoded.wait_for_finish(request.key)
            wait_until_idle(pair.prefill, pair.decode)
            assert min(pair.prefill.stats().longest_step_s, pair.decode.stats().longest_step_s) > 0
            assert pair.decode.stats().turn_count >= before + 9

    # The end, and everything at once.

    def test_closed_engine_ends_its_requests_and_takes_no_more(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            request = make_request(pair.prefill, "r", 60, 60)
            pair.hand_over(request)
            pair.prefill.close()
            pair.decode.close()
            pair.prefill.close()
            told = len(pair.prefilled.events), len(pair.decoded.events)
            with pytest.raises(EngineError):
                pair.prefill.prefill(request)
            with pytest.raises(EngineError):
                pair.decode.reserve(request, 60.0).result(SOON_S)
            pair.prefill.abort(request.key)
            pair.decode.abort(request.key)
            wait_until_free(pair.prefill, pair.decode)
            assert (len(pair.prefilled.events), len(pair.decoded.events)) == told

    @pytest.mark.parametrize("seed", range(2))
    def test_random_mix_on_small_pools_gives_exact_tokens_and_leaks_no_block(
        self, harness: EngineHarness, seed: int
    ) -> None:
        print(f"seed {seed}")
        rng = random.Random(seed)
        prefill_blocks, blocks = longest_blocks(harness)
        decode_blocks = blocks + rng.randrange(6)
        with running_pair(harness, prefill_blocks=2 * prefill_blocks, decode_blocks=decode_blocks, max_batch=4) as pair:
            kept: list[EngineRequest] = []
            for i in range(24):
                request = make_request(pair.prefill, f"r{i}", rng.randrange(1, 70), rng.randrange(1, 50), seed)
                pair.hand_over(request)
                fate = rng.random()
                if fate < 0.3:
                    for engine in rng.sample((pair.prefill, pair.decode), 2):
                        engine.abort(request.key)
                else:
                    kept.append(request)
                pair.prefill.check_integrity()
                pair.decode.check_integrity()
            for request in kept:
                assert pair.answer(request) == harness.answer(request.token_ids, request.params.max_tokens or 0)
            wait_until_free(pair.prefill, pair.decode)
