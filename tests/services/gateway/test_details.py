"""Logprobs, echoed prompts, usage in each event, /tokenize and /detokenize."""

from typing import Any

import openai
import pytest

from kaveri import SamplingParams
from kaveri.errors import InvalidArgument, ModelNotFound
from tests.services.gateway.conftest import GatewayUnderTest
from tests.services.router.scripted_answers import CACHED_TOKENS, answer


async def test_a_completions_report_names_each_token_and_the_likeliest(gateway: GatewayUnderTest) -> None:
    sdk = await gateway.sdk.generate(prompt_token_ids=[300, 301, 302], params=_params(max_tokens=5, logprobs=2))
    choice = (await gateway.complete(logprobs=2)).json["choices"][0]
    report = choice["logprobs"]
    assert report["tokens"] == [entry.text for entry in sdk.logprobs]
    # The scripted prefill instance reports nothing on the first token, the decode instance its index.
    assert report["token_logprobs"] == [entry.logprob for entry in sdk.logprobs]
    assert report["text_offset"] == [sum(len(text) for text in report["tokens"][:index]) for index in range(5)]
    for entry, top in zip(sdk.logprobs, report["top_logprobs"], strict=True):
        assert set(top) == {entry.text, *entry.top_texts}
    events = (await gateway.complete(logprobs=2, stream=True)).events
    streamed = [event["choices"][0]["logprobs"] for event in events]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for each in streamed if each is not None for item in each[key]] == report[key]


async def test_a_token_is_named_by_what_it_decodes_to(gateway: GatewayUnderTest) -> None:
    backend = gateway.router.router.intake.tokenizer.backend
    sdk = await gateway.sdk.generate(prompt_token_ids=[300], params=_params(max_tokens=4, logprobs=0))
    assert [entry.text for entry in sdk.logprobs] == [backend.decode([token]) for token in answer((300,), 4)]


async def test_a_chats_report_is_what_the_openai_package_expects(gateway: GatewayUnderTest) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        got = await client.chat.completions.create(
            model="kaveri-tiny", messages=messages, logprobs=True, top_logprobs=2, max_tokens=4
        )
    report = got.choices[0].logprobs
    assert report is not None
    assert report.content is not None
    assert len(report.content) == 4
    assert all(len(entry.top_logprobs) in (0, 2) for entry in report.content)
    assert all(bytes(entry.bytes or []) == entry.token.encode() for entry in report.content)


@pytest.mark.parametrize("prompt", ["hello world", [300, 301, 302]])
async def test_echo_puts_the_prompt_before_each_answer(gateway: GatewayUnderTest, prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else await gateway.sdk.detokenize(prompt)
    plain = (await gateway.complete(prompt=prompt)).json["choices"][0]["text"]
    got = (await gateway.complete(prompt=prompt, echo=True, n=2)).json
    assert [choice["text"] for choice in got["choices"]] == [text + plain] * 2
    events = (await gateway.complete(prompt=prompt, echo=True, stream=True)).events
    assert "".join(event["choices"][0]["text"] for event in events) == text + plain


@pytest.mark.parametrize("prompt", ["hello world", [300, 301, 302, 303, 304], [300]])
async def test_echo_with_logprobs_reports_on_the_prompt_too(gateway: GatewayUnderTest, prompt: Any) -> None:
    ids = list(await gateway.sdk.tokenize(prompt)) if isinstance(prompt, str) else prompt
    params = _params(max_tokens=5, logprobs=2, prompt_logprobs=2)
    sdk = await gateway.sdk.generate(prompt_token_ids=ids, params=params)
    choice = (await gateway.complete(prompt=prompt, echo=True, logprobs=2)).json["choices"][0]
    report, count = choice["logprobs"], len(ids)
    texts = [token.text for token in sdk.prompt_tokens] + [entry.text for entry in sdk.logprobs]
    assert report["tokens"] == texts
    assert choice["text"] == "".join(texts)
    assert report["text_offset"] == [sum(len(text) for text in texts[:index]) for index in range(count + 5)]
    entries = [token.logprobs for token in sdk.prompt_tokens[1:]]
    assert report["token_logprobs"][:count] == [None, *(entry.logprob for entry in entries if entry is not None)]
    assert report["token_logprobs"][count:] == [entry.logprob for entry in sdk.logprobs]
    assert report["top_logprobs"][0] is None
    assert all(len(top) in (2, 3) for top in report["top_logprobs"][1:count])
    events = (await gateway.complete(prompt=prompt, echo=True, logprobs=2, stream=True)).events
    streamed = [event["choices"][0]["logprobs"] for event in events]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for each in streamed if each is not None for item in each[key]] == report[key]
    plain = (await gateway.complete(prompt=prompt, logprobs=2)).json["choices"][0]
    assert plain["logprobs"]["tokens"] == texts[count:]


async def test_the_offsets_of_a_prompt_count_characters_and_not_tokens_replacements(gateway: GatewayUnderTest) -> None:
    prompt = "naïve 你好 🙂 end"
    for stream in (False, True):
        got = await gateway.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=4, stream=stream)
        choices = [event["choices"][0] for event in got.events] if stream else got.json["choices"]
        text = "".join(choice["text"] for choice in choices)
        reports = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        named = [each for report in reports for each in zip(report["tokens"], report["text_offset"], strict=True)]
        assert any("\ufffd" in token for token, _ in named), "parts of characters"
        assert all(text.startswith(token, offset) for token, offset in named if "\ufffd" not in token), named


async def test_prompt_logprobs_are_shown_as_vllm_shows_them(gateway: GatewayUnderTest) -> None:
    ids = [300, 301, 302, 303]
    sdk = await gateway.sdk.generate(prompt_token_ids=ids, params=_params(max_tokens=5, prompt_logprobs=1))
    entries = [token.logprobs for token in sdk.prompt_tokens]
    expected: list[Any] = [None]
    for token in sdk.prompt_tokens[1:]:
        assert token.logprobs is not None
        likely = {"logprob": 0.0, "rank": 1, "decoded_token": token.logprobs.top_texts[0]}
        own = {"logprob": token.logprobs.logprob, "rank": None, "decoded_token": token.text}
        expected.append({str(token.token_id): own, "300": likely})
    assert len(entries) == 4
    for choice in (await gateway.complete(prompt=ids, prompt_logprobs=1, n=2)).json["choices"]:
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"] is None
    chat = (await gateway.chat(prompt_logprobs=0)).json
    asked = await gateway.sdk.tokenize(messages=[{"role": "user", "content": "hello"}])
    assert [list(each) for each in chat["prompt_logprobs"][1:]] == [[str(token_id)] for token_id in asked[1:]]


async def test_return_token_ids_shows_those_of_the_prompt(gateway: GatewayUnderTest) -> None:
    ids = list(await gateway.sdk.tokenize("hello world"))
    (choice,) = (await gateway.complete(prompt="hello world", return_token_ids=True)).json["choices"]
    assert choice["prompt_token_ids"] == ids
    events = (await gateway.complete(prompt="hello world", return_token_ids=True, stream=True)).events
    assert events[0]["choices"][0]["prompt_token_ids"] == ids
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    chat = (await gateway.chat(return_token_ids=True)).json
    assert chat["prompt_token_ids"] == list(await gateway.sdk.tokenize(messages=[{"role": "user", "content": "hello"}]))
    assert len(chat["choices"][0]["token_ids"]) == 5
    assert chat["usage"]["prompt_tokens"] == len(chat["prompt_token_ids"])


async def test_continuous_usage_counts_up_with_each_event(gateway: GatewayUnderTest) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await gateway.complete(stream=True, stream_options=options, max_tokens=12, return_token_ids=True)).events
    count = 0
    for event in events[:-1]:
        count += len(event["choices"][0]["token_ids"])
        assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
    details = {"prompt_tokens_details": {"cached_tokens": CACHED_TOKENS}}
    assert events[-1] == {**events[-1], "choices": [], "usage": events[-2]["usage"] | details}


async def test_tokenizing_has_the_limits_of_generating(gateway: GatewayUnderTest) -> None:
    with pytest.raises(ModelNotFound):
        await gateway.sdk.tokenize("x", model="nope")
    with pytest.raises(ModelNotFound):
        await gateway.sdk.detokenize([1], model="nope")
    with pytest.raises(InvalidArgument, match="at most"):
        await gateway.sdk.tokenize("word " * 20_000)
    with pytest.raises(InvalidArgument, match="at most"):
        await gateway.sdk.detokenize([300] * 20_000)
    with pytest.raises(InvalidArgument, match="vocabulary"):
        await gateway.sdk.detokenize([10**6])
    with pytest.raises(InvalidArgument, match="at least one"):
        await gateway.sdk.tokenize("")


async def test_tokenize_and_detokenize_over_http(gateway: GatewayUnderTest) -> None:
    text = "Count from 1 to 9: äöü 漢字"
    got = await gateway.ask("/tokenize", {"prompt": text})
    assert got.json["tokens"] == list(await gateway.sdk.tokenize(text))
    assert (await gateway.complete(prompt=text)).json["usage"]["prompt_tokens"] == got.json["count"]
    assert got.json["count"] == len(got.json["tokens"])
    assert got.json["max_model_len"] > 0
    chat = await gateway.ask("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json["tokens"] == list(await gateway.sdk.tokenize(messages=[{"role": "user", "content": "hi"}]))
    back = await gateway.ask("/detokenize", {"model": "kaveri-tiny", "tokens": got.json["tokens"]})
    assert back.json == {"prompt": text}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ):
        refused = await gateway.ask(path, body)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body


async def test_tokenize_takes_what_a_chats_prompt_depends_on(gateway: GatewayUnderTest) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Tells the weather."}}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good"}]
    for fields in (
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "none"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"reasoning_effort": "none", "chat_template_kwargs": {}},
    ):
        chat = await gateway.chat(messages=messages, return_token_ids=True, **fields)
        got = await gateway.ask("/tokenize", {"messages": messages, **fields})
        assert got.json["tokens"] == chat.json["prompt_token_ids"], fields
    for body, param in (
        ({"messages": messages, "tools": "x"}, "tools"),
        ({"messages": messages, "tools": [tool] * 2}, "tools[1].function.name"),
        ({"messages": messages, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": messages, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"messages": messages, "add_generation_prompt": 1}, "add_generation_prompt"),
        ({"prompt": "x", "tools": [tool]}, "tools"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
    ):
        refused = await gateway.ask("/tokenize", body)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)
