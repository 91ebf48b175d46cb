"""Which requests hold or are promised vLLM's blocks, and which are in its running batch. None of it needs vLLM."""

import pytest

from kaveri.domain.sampling import SamplingParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.phase import Phase
from kaveri.engine.vllm.account import Account
from kaveri.engine.vllm.hosted import Hosted
from kaveri.errors import NoCapacity, RequestAlreadyExists
from kaveri.kv.layout.layout import KvLayout

_LAYOUT = KvLayout("test", 1, 4, 1, 4, "float32")


def _request(name: str, prompt_tokens: int) -> EngineRequest:
    return EngineRequest(EngineKey(name, 1), (0,) * prompt_tokens, 0, SamplingParams(max_tokens=5, seed=0))


def _prefill(name: str, prompt_tokens: int) -> Hosted:
    return Hosted.prefill(name, _request(name, prompt_tokens), _LAYOUT)


def _decode(name: str, prompt_tokens: int) -> Hosted:
    return Hosted.decode(name, _request(name, prompt_tokens), _LAYOUT)


def _admitted(account: Account, name: str) -> Hosted:
    hosted = _decode(name, 3)
    account.open(hosted)
    hosted.phase = Phase.WAITING
    account.waiting.append(hosted)
    return hosted


def test_what_was_promised_between_two_steps_is_promised_to_nobody_else() -> None:
    account = Account(10)
    # Five blocks, and four for 12 tokens and the next.
    account.open(_prefill("a", 20))
    account.open(_decode("b", 12))
    assert account.free_blocks == 1
    with pytest.raises(NoCapacity, match="2 KV blocks are needed, 1 are free") as raised:
        account.open(_prefill("c", 8))
    assert raised.value.role == "prefill"
    account.open(_prefill("d", 4))
    assert account.free_blocks == 0
    with pytest.raises(RequestAlreadyExists):
        account.open(_prefill("d", 1))


def test_blocks_that_vllm_has_given_are_not_counted_twice() -> None:
    account = Account(10)
    hosted = _prefill("a", 20)
    account.open(hosted)
    hosted.take([7, 8])
    account.unused_blocks = 8
    assert account.free_blocks == 5
    assert hosted.take([7, 8, 9]) == (9,)
    account.unused_blocks = 7
    assert account.free_blocks == 5


def test_block_of_an_answers_next_token_is_free_for_nobody_between_two_steps() -> None:
    account = Account(10)
    hosted = _admitted(account, "a")
    account.admit(8)
    hosted.started = True
    for computed, claimed in ((4, 1), (5, 0), (7, 0), (8, 1)):
        hosted.computed = computed
        hosted.claim_next(_LAYOUT.block_tokens)
        assert account.free_blocks == 10 - claimed


def test_nothing_new_is_taken_while_a_preempted_request_waits_for_blocks() -> None:
    account = Account(10)
    hosted = _admitted(account, "a")
    hosted.preempted = True
    for newcomer in (_prefill("b", 1), _decode("c", 1)):
        with pytest.raises(NoCapacity, match="a preempted request waits"):
            account.open(newcomer)
    hosted.preempted = False
    account.open(_prefill("b", 1))


def test_batch_is_filled_in_order_and_no_further_than_it_holds() -> None:
    account = Account(40)
    first, second, third = (_admitted(account, name) for name in "abc")
    assert account.admit(2) == [first, second]
    assert account.admit(2) == []
    assert account.running_count() == 2
    account.end(first)
    assert account.admit(2) == [third]
    account.check_integrity([])


def test_request_that_ended_while_it_waited_is_not_admitted() -> None:
    account = Account(40)
    first, second = (_admitted(account, name) for name in "ab")
    account.end(first)
    account.check_integrity([])
    assert account.admit(8) == [second]
    assert account.stats().waiting_requests == 0
    assert account.free_blocks == 39
    # Known until vLLM has its blocks back.
    assert first in account.ended
    account.forget(first)
    assert first.number not in account.by_number
