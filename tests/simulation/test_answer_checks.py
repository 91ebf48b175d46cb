"""The checks on answers find what is wrong with them, and nothing where nothing is."""

from dataclasses import replace

import pytest

from kaveri.client.answer import Chunk, Usage
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.engine.contract import EngineKey
from kaveri.engine.stepwise.fake import FakeModel
from tests.simulation.cluster.answer_checks import AnswerChecker, expected_answer
from tests.simulation.cluster.draws import DrawRecord, DrawRun, life_salt
from tests.simulation.cluster.outcomes import RequestOutcome
from tests.simulation.cluster.tokenizer import EOS_TOKEN_ID, make_tokenizer, texts_of

_TOKENIZER = make_tokenizer()
_BACKEND = _TOKENIZER.backend_tokenizer
_MODEL = FakeModel(vocab_size=len(_TOKENIZER), layer_count=1, eos_token_id=EOS_TOKEN_ID)
_PROMPT = (5, 9, 13, 2)
_GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
_OLD, _NEW = DrawRun(71, EngineKey("r", 1)), DrawRun(72, EngineKey("r", 1))


def _outcome(token_ids: tuple[int, ...], params: SamplingParams = _GREEDY) -> RequestOutcome:
    """An answer of these tokens that came in chunks of up to three."""
    text, stopped = min(texts_of(_BACKEND, _PROMPT, token_ids, params.stop))
    finish = FinishReason.STOP if stopped else FinishReason.LENGTH
    outcome = RequestOutcome(
        request_id="r",
        router="router-0",
        process="client-0#1",
        prompt=_PROMPT,
        text=None,
        params=params,
        started_s=0.0,
        timeout_s=60.0,
        finish=finish,
    )
    for index in range(0, len(token_ids), 3):
        piece = token_ids[index : index + 3]
        outcome.chunks.append(_chunk(index, piece, text if index == 0 else ""))
    usage = Usage(prompt_tokens=len(_PROMPT), completion_tokens=len(token_ids))
    outcome.chunks[-1] = replace(outcome.chunks[-1], usage=usage, finish_reason=finish)
    return outcome


def _chunk(index: int, token_ids: tuple[int, ...], text: str) -> Chunk:
    return Chunk(index=index, token_ids=token_ids, text=text, logprobs=(), finish_reason=None, usage=None, timing=None)


def _draw(draws: DrawRecord, run: DrawRun, start: tuple[int, ...], count: int, divergent: bool) -> tuple[int, ...]:
    """`run` goes on behind the tokens `start` of the answer; returns the answer with what it drew."""
    token_ids = start
    for _ in range(count):
        chain = _MODEL.chain(_PROMPT + token_ids)
        token_id = _MODEL.draw(chain ^ (life_salt(run) if divergent else 0), len(token_ids))
        draws.add(run, len(token_ids), chain, token_id)
        token_ids = (*token_ids, token_id)
    return token_ids


def _violations(draws: DrawRecord, outcome: RequestOutcome, divergent: bool = False) -> list[str]:
    return AnswerChecker(_MODEL, draws, _BACKEND, divergent).violations(outcome)


def test_right_answer_has_no_violation() -> None:
    draws = DrawRecord()
    token_ids = _draw(draws, _OLD, (), 12, divergent=False)
    assert token_ids == expected_answer(_MODEL, _PROMPT, _GREEDY.resolved(), 12)
    assert _violations(draws, _outcome(token_ids)) == []


def test_answer_that_another_life_goes_on_with_has_no_violation() -> None:
    draws = DrawRecord()
    token_ids = _draw(draws, _NEW, _draw(draws, _OLD, (), 5, divergent=True), 7, divergent=True)
    assert _violations(draws, _outcome(token_ids), divergent=True) == []


def test_token_of_a_life_whose_former_tokens_the_client_did_not_get_is_found() -> None:
    draws = DrawRecord()
    whole = _draw(draws, _OLD, (), 12, divergent=True)
    mixed = _draw(draws, _NEW, whole[:5], 3, divergent=True)
    assert mixed[5:8] != whole[5:8]
    assert "no engine drew token 8" in _violations(draws, _outcome(mixed + whole[8:]), divergent=True)[0]


def test_token_of_an_owner_that_was_replaced_is_found() -> None:
    draws = DrawRecord()
    first = _draw(draws, _OLD, (), 4, divergent=True)
    second = _draw(draws, _NEW, first, 4, divergent=True)
    # The old one goes on behind the new one's tokens, which it can only have from somewhere else.
    third = _draw(draws, _OLD, second, 4, divergent=True)
    assert "had replaced" in _violations(draws, _outcome(third), divergent=True)[0]


def test_wrong_token_is_found() -> None:
    draws = DrawRecord()
    token_ids = _draw(draws, _OLD, (), 12, divergent=False)
    wrong = (*token_ids[:6], (token_ids[6] + 1) % 40 + 1, *token_ids[7:])
    found = _violations(draws, _outcome(wrong))
    assert any("token 6" in each for each in found), found


def test_gap_between_chunks_is_found() -> None:
    draws = DrawRecord()
    outcome = _outcome(_draw(draws, _OLD, (), 12, divergent=False))
    outcome.chunks[2] = replace(outcome.chunks[2], index=7)
    assert "came behind 6 tokens" in _violations(draws, outcome)[0]


@pytest.mark.parametrize("text", ["", "x"])
def test_text_that_differs_from_the_tokens_is_found(text: str) -> None:
    draws = DrawRecord()
    outcome = _outcome(_draw(draws, _OLD, (), 12, divergent=False))
    outcome.chunks[0] = replace(outcome.chunks[0], text=text)
    assert "the text is" in _violations(draws, outcome)[0]


def test_answer_past_its_stop_text_is_found() -> None:
    draws = DrawRecord()
    token_ids = _draw(draws, _OLD, (), 12, divergent=False)
    text = _BACKEND.decode(list(token_ids))
    outcome = _outcome(token_ids, replace(_GREEDY, stop=(text[2:4],)))
    outcome.finish = FinishReason.LENGTH
    assert any("past a stop text" in each for each in _violations(draws, outcome))


def test_answer_that_ends_early_by_length_is_found() -> None:
    draws = DrawRecord()
    assert "by length after 9 of 12" in _violations(draws, _outcome(_draw(draws, _OLD, (), 9, divergent=False)))[0]
