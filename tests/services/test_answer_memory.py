"""Tokens and text of answers are stored so that garbage collection does not visit each of them."""

import gc
from collections.abc import Iterable

from kaveri.client.answer import Chunk
from kaveri.client.received import Received
from kaveri.domain.sampling import SamplingParams
from kaveri.engine.contract import EngineKey, TokenStep
from kaveri.models import KAVERI_TINY
from kaveri.text.answer import Answer
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2
from services.decode.requests import AnswerLog
from services.gateway.formats import CompletionFormat
from services.gateway.parsed_request import ParsedRequest
from services.gateway.shown_prompts import ShownPrompt

TOKENS = 5_000


def referents(roots: Iterable[object]) -> int:
    """Count what a full garbage collection visits from these objects on, without modules and classes."""
    seen: dict[int, object] = {}
    visits, waiting = 0, list(roots)
    while waiting:
        found = [each for each in gc.get_referents(waiting.pop()) if not isinstance(each, type)]
        visits += len(found)
        for each in found:
            if id(each) not in seen and gc.is_tracked(each) and not hasattr(each, "__globals__"):
                seen[id(each)] = each
                waiting.append(each)
    return visits


def chunk(index: int, text: str) -> Chunk:
    return Chunk(
        index=index, token_ids=(300 + index,), text=text, logprobs=(), finish_reason=None, usage=None, timing=None
    )


def test_a_client_holds_the_tokens_of_an_answer_without_an_object_for_each() -> None:
    received = Received()
    before = referents([received])
    for index in range(TOKENS):
        received.take(inference_pb2.GenerateResponse(index=index, token_ids=[300 + index], text="ab"), "router")
    assert referents([received]) <= before + 10


def test_a_router_holds_the_tokens_that_its_client_has_taken_without_an_object_for_each() -> None:
    tokenizer = ModelTokenizer.load(KAVERI_TINY)
    answer = Answer(tokenizer.detokenizer([70], ()))
    before = referents([answer])
    for index in range(TOKENS):
        answer.append([300 + index % 500], (), None, float(index))
        assert answer.take().first_index == index
    assert referents([answer]) <= before + 20
    tokenizer.close()


def test_a_decode_instance_holds_the_tokens_of_an_answer_without_an_object_for_each() -> None:
    log = AnswerLog(0, 0)
    before = referents([log])
    for index in range(TOKENS):
        log.gain(TokenStep(EngineKey("a", 1), index, 300 + index, None, None), None)
    assert referents([log]) <= before + 10


def test_a_gateway_gathers_an_answer_without_an_object_for_each_token() -> None:
    asked = ParsedRequest(model="m", prompts=((1,),), params=SamplingParams(), return_token_ids=True)
    made = CompletionFormat(asked, [ShownPrompt()], "id", "m", 0)
    list(made.gather(0, chunk(0, "ab")))
    before = referents([made])
    for index in range(1, TOKENS):
        list(made.gather(0, chunk(index, f"{index} ")))
    assert referents([made]) <= before + 10
