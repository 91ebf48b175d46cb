import json
from typing import Any

import pytest

from kaveri.client.answer import Chunk, PromptToken, Usage
from kaveri.domain.sampling import FinishReason, Logprobs
from services.gateway.formats import AnswerFormat, ChatFormat, CompletionFormat
from services.gateway.parsed_request import read_chat, read_completion
from services.gateway.shown_prompts import ShownPrompt

_CHAT = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}


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


@pytest.mark.parametrize(("read", "form"), [(read_completion, CompletionFormat), (read_chat, ChatFormat)])
def test_a_long_report_is_written_in_slices_and_is_the_same(read: Any, form: type[AnswerFormat]) -> None:
    asked_of = {"prompt": [300], "logprobs": 2} if read is read_completion else _CHAT
    asked = read({**asked_of, "max_tokens": 2_000}, 1)
    entries = [
        Logprobs(-1.0, ((7, -0.5), (8, -1.0)), text=str(number), top_texts=("a", "b")) for number in range(2_000)
    ]

    def chunk_of(part: list[Logprobs], finish: FinishReason | None) -> Chunk:
        usage = Usage(prompt_tokens=1, completion_tokens=2_000)
        ids = tuple(range(len(part)))
        return Chunk(
            index=0, token_ids=ids, text="x", logprobs=tuple(part), finish_reason=finish, usage=usage, timing=None
        )

    at_once, in_parts = (form(asked, [ShownPrompt()], "x", "m", 0) for _ in range(2))
    slices: list[int] = []
    pauses = 0
    original = at_once._report

    def counted(index: int, logprobs: Any, prompt: Any) -> Any:
        slices.append(len(logprobs) + len(prompt))
        return original(index, logprobs, prompt)

    at_once._report = counted  # type: ignore[method-assign]
    for _ in at_once.gather(0, chunk_of(entries, FinishReason.LENGTH)):
        pauses += 1
    assert max(slices) <= 256
    assert pauses == len(slices)
    for start in range(0, 2_000, 7):
        finish = FinishReason.LENGTH if start + 7 >= 2_000 else None
        list(in_parts.gather(0, chunk_of(entries[start : start + 7], finish)))
    choices = [json.loads(b"".join(each.whole()))["choices"][0] for each in (at_once, in_parts)]
    assert choices[0]["logprobs"] == choices[1]["logprobs"]
    named = choices[0]["logprobs"].get("tokens") or [each["token"] for each in choices[0]["logprobs"]["content"]]
    assert named == [str(number) for number in range(2_000)]
    assert choices[0]["finish_reason"] == "length"
