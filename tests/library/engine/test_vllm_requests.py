"""Requests that hold or are promised vLLM's blocks, or are in its running batch. Needs no vLLM."""

from dataclasses import replace
from typing import Any

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineEvent, EngineInfo, EngineKey, EngineRequest, TokenStep
from kaveri.engine.vllm import life
from kaveri.engine.vllm.request import Entry, EntryPhase, VllmRequest
from kaveri.engine.vllm.requests import Requests
from kaveri.errors import NoCapacity, RequestAlreadyExists
from kaveri.kv.layout.layout import KvLayout

_LAYOUT = KvLayout("test", 1, 4, 1, 4, "float32")


class _Table(Requests):
    """Requests with a record of their events, and the steps that vLLM would make."""

    def __init__(self, total_blocks: int) -> None:
        self.told: list[EngineEvent] = []
        info = EngineInfo("vllm", _LAYOUT, total_blocks, 100, 1000, frozenset(), 1, ())
        super().__init__(info, self.told.append, lambda: None)

    def admitted(self, name: str, prompt_tokens: int = 3) -> VllmRequest:
        request = self.open_decode(_request(name, prompt_tokens))
        self.apply(request, life.BlocksAllocated(_LAYOUT.block_count(prompt_tokens + 1)))
        self.apply(request, life.KvArrived(7))
        self.admit(request.key)
        return request

    def fill_batch(self, max_batch: int) -> list[VllmRequest]:
        joined = self.take_waiting(max_batch)
        for request in joined:
            self.apply(request, life.Joined(anew=True))
        return joined

    def step(self, request: VllmRequest, computed: int, block_count: int = 0) -> None:
        self.apply(request, life.Scheduled(block_count))
        self.apply(request, life.Stepped(computed))

    def draw(self, request: VllmRequest, computed: int, block_count: int = 0) -> list[Any]:
        """Run a step that draws a token. Returns the actions left to the caller of apply()."""
        self.apply(request, life.Scheduled(block_count))
        return list(self.apply(request, life.Drawn(computed, 7, None, None)))


def _request(name: str, prompt_tokens: int) -> EngineRequest:
    return EngineRequest(EngineKey(name, 1), (0,) * prompt_tokens, 0, ResolvedParams(max_tokens=5, seed=0))


def test_what_was_promised_between_two_steps_is_promised_to_no_other() -> None:
    table = _Table(10)
    table.open_prefill(_request("a", 20))
    table.open_decode(_request("b", 12))
    assert table.free_blocks == 1
    with pytest.raises(NoCapacity, match="2 KV blocks are needed, 1 are free") as raised:
        table.open_prefill(_request("c", 8))
    assert raised.value.role == "prefill"
    table.open_prefill(_request("d", 4))
    assert table.free_blocks == 0
    with pytest.raises(RequestAlreadyExists):
        table.open_prefill(_request("d", 1))


def test_blocks_that_vllm_has_given_are_not_counted_twice() -> None:
    table = _Table(10)
    request = table.open_prefill(_request("a", 20))
    table.step(request, 8, block_count=2)
    table.unused_blocks = 8
    assert table.free_blocks == 5
    table.step(request, 12, block_count=3)
    table.unused_blocks = 7
    assert table.free_blocks == 5


def test_block_of_an_answers_next_token_is_free_for_no_other_between_two_steps() -> None:
    table = _Table(10)
    request = table.admitted("a")
    table.fill_batch(8)
    for computed, claimed in ((4, 1), (5, 0), (7, 0), (8, 1)):
        table.step(request, computed)
        assert table.free_blocks == 10 - claimed


def test_an_adopted_prompt_keeps_room_for_its_next_token() -> None:
    table = _Table(10)
    for name, prompt_tokens, claimed in (("full", 8, 1), ("part full", 7, 0)):
        request = table.open_prefill(_request(name, prompt_tokens))
        table.draw(request, prompt_tokens, block_count=2)
        assert table.free_blocks == 10
        table.adopt(request.key)
        assert table.free_blocks == 10 - claimed
        table.end(request)
    table.check_integrity([])


def _computed(table: _Table, name: str, *, stays: bool) -> VllmRequest:
    """Return a computed prompt that fills two blocks."""
    request = table.open_prefill(replace(_request(name, 8), stays=stays))
    record: Any = object()
    request.entry = Entry(request, f"vllm-{name}", record, EntryPhase.COMPUTING)
    table.draw(request, 8, block_count=2)
    return request


def test_a_prompt_draws_ahead_while_it_stays_and_batch_and_blocks_have_room() -> None:
    table = _Table(10)
    staying, other = _computed(table, "staying", stays=True), _computed(table, "other", stays=False)
    table.admitted("running")
    table.fill_batch(8)
    assert table.held(1) == [staying, other]
    assert table.held(2) == [other]
    table.open_prefill(_request("prompt", 12))
    for unused, held in ((3, [staying, other]), (4, [other])):
        table.unused_blocks = unused
        assert table.held(2) == held
    for index in range(life.MAX_AHEAD):
        assert table.held(2) == [other]
        assert table.draw(staying, 9 + index) == []
    assert table.held(2) == [staying, other], "it runs ahead without end"
    table.adopt(staying.key)
    table.admit(staying.key)
    assert table.take_waiting(2) == [staying]
    told = table.apply(staying, life.Joined())
    assert [token.index for token in told if isinstance(token, TokenStep)] == [*range(1, 1 + life.MAX_AHEAD)]


def test_nothing_new_is_taken_while_a_preempted_request_waits_for_blocks() -> None:
    table = _Table(10)
    evicted, left_out = table.admitted("a"), table.admitted("b")
    table.fill_batch(8)
    table.step(evicted, 4)
    table.apply(evicted, life.Signal.BLOCKS_TAKEN)
    table.apply(left_out, life.Signal.LEFT_OUT)
    for scheduled in (evicted, left_out):
        with pytest.raises(NoCapacity, match="a preempted request waits"):
            table.open_prefill(_request("c", 1))
        with pytest.raises(NoCapacity, match="a preempted request waits"):
            table.open_decode(_request("d", 1))
        table.step(scheduled, 4)
    table.open_prefill(_request("c", 1))


def test_batch_is_filled_in_order_and_no_further_than_it_holds() -> None:
    table = _Table(40)
    first, second, third = (table.admitted(name) for name in "abc")
    assert table.fill_batch(2) == [first, second]
    assert table.fill_batch(2) == []
    assert table.running_count() == 2
    table.end(first)
    assert table.fill_batch(2) == [third]
    assert isinstance(third.state, life.Joining)
    table.check_integrity([])


def test_request_that_ended_while_it_waited_is_not_admitted() -> None:
    table = _Table(40)
    first, second = (table.admitted(name) for name in "ab")
    table.abort(first.key)
    table.check_integrity([])
    assert table.fill_batch(8) == [second]
    assert table.stats().waiting_requests == 0
    assert first in table.ended
    table.forget(first)
    assert first.engine_id not in table.by_id


def test_what_a_request_leaves_behind_is_known_until_vllm_has_it_back() -> None:
    table = _Table(40)
    request = table.admitted("a")
    record: Any = object()
    entry = Entry(request, "vllm-1", record, EntryPhase.KEPT)
    request.entry = entry
    table.leave_entry(request)
    left = entry.owner
    assert (request.entry, left.entry, left.done) == (None, entry, True)
    table.check_integrity(["vllm-1"])
    table.forget(left)
    with pytest.raises(AssertionError, match="vllm-1"):
        table.check_integrity(["vllm-1"])
    assert table.by_id[request.engine_id] is request


def test_vllm_is_given_one_suspect_at_a_time() -> None:
    table = _Table(100)

    def suspect(name: str, until: int) -> EngineRequest:
        return replace(_request(name, 3), suspect_until=until)

    first, second = (table.open_prefill(suspect(name, 1)) for name in ("first", "second"))
    other = table.open_prefill(_request("other", 3))
    assert table.take_added() == [first, other]
    assert table.take_added() == []
    table.open_decode(suspect("third", 9))
    (third,) = table.take_added()
    table.apply(third, life.BlocksAllocated(1))
    table.apply(third, life.KvArrived(7))
    table.admit(third.key)
    assert table.fill_batch(8) == []
    table.draw(first, 3, block_count=1)
    assert table.take_added() == [second]
    assert table.fill_batch(8) == []
    table.end(second)
    assert table.fill_batch(8) == [third]
