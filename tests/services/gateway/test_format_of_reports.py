"""How reports on tokens look in OpenAI's form."""

import json

from kaveri.client.answer import Chunk, PromptToken
from kaveri.domain.sampling import Logprobs
from services.gateway.asked import read_chat, read_completion
from services.gateway.formats import ChatFormat, CompletionFormat
from services.gateway.shown_prompts import ShownPrompt


def test_of_tokens_with_the_same_text_the_likeliest_counts() -> None:
    piece = "\ufffd"
    entry = Logprobs(-3.0, ((7, -0.5), (8, -1.0), (9, -3.0)), text=piece, top_texts=(piece, "a", piece))
    asked = read_completion({"prompt": [300], "logprobs": 3, "max_tokens": 1, "stream": True}, 1)
    chunk = Chunk(index=0, token_ids=(9,), text=piece, logprobs=(entry,), finish_reason=None, usage=None, timing=None)
    (event,) = CompletionFormat(asked, [ShownPrompt()], "x", "m", 0).events(0, chunk, 1)
    report = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]
    assert report["top_logprobs"] == [{piece: -0.5, "a": -1.0}]
    assert report["token_logprobs"] == [-3.0]


def test_a_part_of_a_character_is_shown_by_its_own_bytes() -> None:
    piece = "\ufffd"
    texts, pieces = (piece, "é", piece), (b"\xbd", b"", "\ufffd".encode())
    entry = Logprobs(-3.0, ((7, -0.5), (8, -1.0), (9, -3.0)), piece, texts, b"\xe4", pieces)
    messages = [{"role": "user", "content": "x"}]
    asked = read_chat({"messages": messages, "logprobs": True, "top_logprobs": 3, "stream": True}, 1)
    chunk = Chunk(index=0, token_ids=(9,), text="", logprobs=(entry,), finish_reason=None, usage=None, timing=None)
    event = b"".join(ChatFormat(asked, [ShownPrompt()], "x", "m", 0).events(0, chunk, 1))
    (report,) = json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["content"]
    assert (report["token"], bytes(report["bytes"])) == (piece, b"\xe4")
    shown = [bytes(each["bytes"]) for each in report["top_logprobs"]]
    assert shown == [b"\xbd", "é".encode(), "\ufffd".encode()]


def test_offsets_begin_with_the_prompt_that_is_shown_and_follow_the_text_of_the_answer() -> None:
    fields = {"prompt": "né x", "logprobs": 0, "echo": True, "max_tokens": 3, "stream": True}
    asked = read_completion(fields, 1)
    form = CompletionFormat(asked, [ShownPrompt("né x")], "x", "m", 0)
    prompt = [PromptToken(token_id=1, text=text, logprobs=None) for text in ("<s>", " n")]
    prompt += [PromptToken(token_id=1, text="\ufffd", logprobs=None, raw_bytes=each) for each in (b"\xc3", b"\xa9")]
    prompt += [PromptToken(token_id=1, text=" x", logprobs=None)]
    answers = [Logprobs(-1.0, (), text=text, text_offset=offset) for text, offset in (("a", 0), ("</s>", 1), ("b", 1))]
    offsets = []
    for prompt_tokens, logprobs in ((prompt[:3], ()), (prompt[3:], answers[:1]), ((), answers[1:])):
        chunk = Chunk(
            index=0,
            token_ids=(9,) * len(logprobs),
            text="",
            logprobs=tuple(logprobs),
            finish_reason=None,
            usage=None,
            timing=None,
            prompt_tokens=tuple(prompt_tokens),
        )
        event = json.loads(b"".join(form.events(0, chunk, 5)).removeprefix(b"data: "))
        offsets += event["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 0, 1, 1, 2, 4, 5, 5]
