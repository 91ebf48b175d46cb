import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kaveri.errors import EngineError, InvalidArgument
from kaveri.models import resolve_model
from kaveri.text.tokenizer import ModelTokenizer
from services.gateway.body import MAX_DEPTH, parse_object
from services.gateway.http_errors import HttpError, http_error_of
from services.gateway.parsed_request import read_chat, read_completion
from tests.services.gateway.conftest import GatewayUnderTest, run_gateway
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import MAX_MODEL_LEN, eventually

_LONG_CHAT = [{"role": "user", "content": "word " * 200}]


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("completions", {"logit_bias": {"five": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {"9999999": 1}}, "logit_bias"),
    ("completions", {"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
    ("completions", {"logit_bias": [5]}, "logit_bias"),
    ("completions", {"min_p": 1.5}, "min_p"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty"),
    ("completions", {"frequency_penalty": "high"}, "frequency_penalty"),
    ("completions", {"bad_words": [""]}, "bad_words"),
    ("completions", {"allowed_token_ids": [10**7]}, "allowed_token_ids"),
    ("completions", {"logit_bias": {"5": 0, "6": False}}, "logit_bias"),
    ("completions", {"metadata": "x"}, "metadata"),
    ("completions", {"reasoning_effort": "none"}, "reasoning_effort"),
    ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("chat/completions", {"verbosity": "high"}, "verbosity"),
    ("chat/completions", {"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools[0].function"),
    ("chat/completions", {"tools": "x", "tool_choice": "none"}, "tools"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("completions", {"presence_penalty": 2.5}, "presence_penalty"),
    ("completions", {"best_of": 3}, "best_of"),
    ("completions", {"suffix": "end"}, "suffix"),
    ("completions", {"min_tokens": 17}, "min_tokens"),
    ("completions", {"min_tokens": -1}, "min_tokens"),
    ("completions", {"min_tokens": "3"}, "min_tokens"),
    ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("completions", {"prompt_logprobs": 1, "echo": True, "logprobs": 2}, "prompt_logprobs"),
    ("completions", {"prompt": ["x" * 8000] * 16, "logprobs": 20, "echo": True}, "logprobs"),
    ("completions", {"prompt": [300] * 7000, "prompt_logprobs": 20}, "prompt_logprobs"),
    ("completions", {"prompt": [300] * 7000, "logprobs": 20, "echo": True}, "logprobs"),
    ("completions", {"prompt": [[300] * 7000] * 2, "logprobs": 20, "echo": True}, "logprobs"),
    ("chat/completions", {"prompt_logprobs": 20, "n": 128, "messages": _LONG_CHAT}, "prompt_logprobs"),
    ("completions", {"no_such_thing": 1}, "no_such_thing"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": [10**7]}, "prompt"),
    ("completions", {"prompt": [10**7], "echo": True}, "prompt"),
    ("completions", {"prompt": ["hi", "x" * 10**6], "return_token_ids": True}, "prompt"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": True}, "n"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"temperature": -1}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    ("completions", {"max_tokens": False, "echo": True}, "max_tokens"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"stop": ["a"] * 17}, "stop"),
    ("completions", {"seed": 1.5}, "seed"),
    ("completions", {"stream": "yes"}, "stream"),
    ("completions", {"model": 7}, "model"),
    ("completions", {"prompt": "\ud800"}, "prompt"),
    ("completions", {"prompt": ["x"] * 300}, "prompt"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat/completions", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ("chat/completions", {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ("completions", {"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    ("completions", {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ("completions", {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ("completions", {"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ("completions", {"guided_grammar": "start: ("}, "guided_grammar"),
    ("completions", {"guided_json": {"type": "text"}}, "guided_json"),
    ("chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ("chat/completions", {"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
    ("chat/completions", {"chat_template_kwargs": {"documents": []}, "n": 2}, "chat_template_kwargs.documents"),
    ("chat/completions", {"reasoning_effort": "low", "return_token_ids": True}, "reasoning_effort"),
    ("chat/completions", {"include_reasoning": "no"}, "include_reasoning"),
    ("chat/completions", {"separate_reasoning": False}, "separate_reasoning"),
    ("chat/completions", {"stream_reasoning": False, "stream": True}, "stream_reasoning"),
    ("completions", {"guided_json_object": 0}, "guided_json_object"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x", "reasoning_details": [1]}]},
        "messages[0].reasoning_details",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "messages[0].content[0].type",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]},
        "messages[0].content[0].text",
    ),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "!" * 65, "content": "x"}]}, "messages[0].role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat/completions", {"top_logprobs": 3}, "top_logprobs"),
)
"""(path, fields, name of the field that must be refused)."""


async def test_a_wrong_or_unsupported_parameter_is_refused_by_its_name(gateway: GatewayUnderTest) -> None:
    for path, fields, param in REFUSED:
        plain = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        got = await gateway.ask(f"/v1/{path}", {**plain, "model": "kaveri-tiny", **fields})
        assert (got.status, got.error["param"]) == (400, param), (fields, got.body)
        assert got.error["type"] == "invalid_request_error"
        assert param in got.error["message"]


async def test_values_that_change_nothing_are_taken(gateway: GatewayUnderTest) -> None:
    plain = (await gateway.complete()).json["choices"]
    harmless = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "logprobs": None,
        "best_of": 1,
        "n": 1,
        "min_p": 0,
        "min_tokens": 0,
        "suffix": None,
        "user": "someone",
        "stop": None,
        "echo": False,
        "stream": False,
        "stream_options": None,
        "top_k": -1,
        "nobody_knows": None,
    }
    assert (await gateway.complete(**harmless)).json["choices"] == plain
    of_chat = (await gateway.chat()).json["choices"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in (
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": 1, "logprobs": False},
        {"parallel_tool_calls": True, "store": False, "service_tier": "auto"},
        {"metadata": {"trace": "x"}},
        {"guided_json_object": False, "structured_outputs": {"json_object": False}},
        {"include_reasoning": True, "separate_reasoning": True, "stream_reasoning": True},
        {"prompt_cache_retention": "24h"},
        {"logit_bias": {"5": 0, "6": 0.0}},
        {"reasoning_effort": "none"},
        {"verbosity": "medium"},
        {"tools": [tool], "tool_choice": "none"},
        {"functions": [tool["function"]], "function_call": "none"},
        {"messages": [{"role": "user", "content": "hello", "name": "ann", "refusal": None}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "e"}}]}
            ]
        },
    ):
        got = await gateway.chat(**fields)
        assert (got.status, got.json.get("choices")) == (200, of_chat), got.body
    both = await gateway.chat(structured_outputs={"json_object": False, "regex": "[a-z]+"})
    assert (both.status, both.json["choices"]) == (200, of_chat)
    events = await gateway.chat(stream=True, stream_options={"include_obfuscation": True})
    assert events.events[-1]["choices"][0]["finish_reason"] == "length"


async def test_fields_that_clients_add_to_an_assistants_message_are_taken(gateway: GatewayUnderTest) -> None:
    def asked(assistant: dict[str, Any]) -> dict[str, Any]:
        user = {"role": "user", "content": "a"}
        return {"messages": [user, {"role": "assistant", **assistant}, user], "return_token_ids": True}

    plain = (await gateway.chat(**asked({"content": "I cannot."}))).json["prompt_token_ids"]
    for assistant in (
        {"content": "I cannot.", "reasoning_details": [], "provider_specific_fields": {"refusal": None}},
        {"content": "I cannot.", "reasoning_details": None, "provider_specific_fields": None, "tool_calls": []},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ):
        got = await gateway.chat(**asked(assistant))
        assert got.json["prompt_token_ids"] == plain


async def test_an_assistants_content_may_be_null_and_no_others(gateway: GatewayUnderTest) -> None:
    first, last = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    empty = await gateway.chat(messages=[first, {"role": "assistant", "content": ""}, last])
    for assistant in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        got = await gateway.chat(messages=[first, assistant, last])
        assert (got.status, got.json["choices"]) == (200, empty.json["choices"])
    got = await gateway.chat(messages=[{"role": "user", "content": None}])
    assert (got.status, got.error["param"]) == (400, "messages[0].content")


async def test_what_vllms_router_adds_to_a_request_is_taken(gateway: GatewayUnderTest) -> None:
    added = {"echo": False, "no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False}
    assert (await gateway.complete(**added)).json["choices"] == (await gateway.complete()).json["choices"]
    del added["echo"]
    reasoning = {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    got = await gateway.chat(**added, **reasoning, continue_final_message=False, ignore_eos=False)
    assert got.json["choices"] == (await gateway.chat()).json["choices"]


async def test_a_prompt_or_an_answer_that_is_too_long_is_refused_with_both_numbers(gateway: GatewayUnderTest) -> None:
    long = await gateway.complete(prompt=[300] * (MAX_MODEL_LEN + 3))
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert str(MAX_MODEL_LEN + 3) in long.error["message"]
    assert str(MAX_MODEL_LEN - 1) in long.error["message"]
    asked = await gateway.complete(max_tokens=MAX_MODEL_LEN)
    assert (asked.status, asked.error["code"], asked.error["param"]) == (400, "context_length_exceeded", "max_tokens")
    chat = await gateway.chat(messages=[{"role": "user", "content": "word " * MAX_MODEL_LEN}])
    assert (chat.status, chat.error["code"], chat.error["param"]) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("model", [None, "kaveri-tiny"])
async def test_stock_clients_recognise_a_prompt_that_is_too_long(gateway: GatewayUnderTest, model: str | None) -> None:
    """LiteLLM matches the message in lower case, langchain-openai 1.7.4 the code in openai's exception text."""
    long = [{"role": "user", "content": "word " * MAX_MODEL_LEN}]
    answers = [
        await gateway.chat(messages=long, model=model),
        await gateway.chat(messages=long, model=model, stream=True),
        await gateway.chat(max_tokens=MAX_MODEL_LEN, model=model),
        await gateway.complete(prompt=[300] * MAX_MODEL_LEN, model=model),
        await gateway.complete(prompt="word " * MAX_MODEL_LEN * 100, model=model),
        await gateway.complete(max_tokens=MAX_MODEL_LEN, model=model),
    ]
    for got in answers:
        assert (got.status, got.error["code"]) == (400, "context_length_exceeded"), got.body
        sentence = f"this model's maximum context length is {MAX_MODEL_LEN} tokens"
        assert sentence in got.error["message"].lower()
        assert "it must be at most" in got.error["message"]
    async with openai.AsyncOpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            await client.completions.create(model="kaveri-tiny", prompt="word " * MAX_MODEL_LEN)
        # Before the first token a stream has the error's status, too.
        with pytest.raises(openai.NotFoundError) as raised:
            await client.completions.create(model="nope", prompt="hi", stream=True)
    assert raised.value.code == "model_not_found"


async def test_too_many_answers_are_not_called_a_long_prompt(gateway: GatewayUnderTest) -> None:
    got = await gateway.complete(prompt=["x"] * 129, n=2)
    assert (got.status, got.error["code"], got.error["param"]) == (400, "invalid_value", "prompt")


async def test_errors_show_values_as_json_and_what_is_left_out(gateway: GatewayUnderTest) -> None:
    got = await gateway.complete(echo="yes", stream=None)
    assert got.error["message"] == 'echo is "yes"; it must be true or false'
    got = await gateway.complete(n=True)
    assert got.error["message"].startswith("n is true; ")
    got = await gateway.complete(stop_token_ids={"a": None, "b": "x" * 500})
    shown = got.error["message"].partition("; it must")[0]
    long = await gateway.complete(prompt=[300] * (MAX_MODEL_LEN + 3))
    assert f'prompt is "{MAX_MODEL_LEN + 3} tokens"; it must' in long.error["message"]
    assert shown.startswith('stop_token_ids is {"a": null, "b": "xxx')
    assert shown.endswith("xxx...")


async def test_an_unknown_model_or_path_or_method_is_told_apart(gateway: GatewayUnderTest) -> None:
    model = await gateway.complete(model="nope")
    assert (model.status, model.error["code"], model.error["param"]) == (404, "model_not_found", "model")
    assert (await gateway.ask("/v1/models/nope")).status == 404
    listed = await gateway.ask("/v1/models/")
    assert (listed.status, listed.json) == (200, (await gateway.ask("/v1/models")).json)
    path = await gateway.ask("/v1/nope")
    assert (path.status, path.error["code"]) == (404, "no_such_path")
    method = await gateway.ask("/v1/completions", method="GET")
    assert (method.status, method.headers["allow"]) == (405, "POST")


async def test_a_full_cluster_says_when_to_try_again(cluster: ScriptedCluster) -> None:
    decode = cluster.decodes["decode-0"]
    decode.pause_at = 4
    async with run_gateway(cluster, router_max_requests=1) as gateway:
        going = asyncio.create_task(gateway.complete(max_tokens=20))
        await eventually(lambda: decode.is_paused)
        got = await gateway.complete()
        assert (got.status, got.error["code"]) == (429, "rate_limit_exceeded")
        assert int(got.headers["retry-after"]) >= 1
        assert int(got.headers["retry-after-ms"]) >= 1
        cluster.let_all_go()
        assert (await going).status == 200


async def test_an_error_after_the_first_token_is_an_event_and_the_end(
    gateway: GatewayUnderTest, cluster: ScriptedCluster
) -> None:
    decode = cluster.decodes["decode-0"]
    decode.pause_at = 4
    got = asyncio.create_task(gateway.complete(stream=True, max_tokens=20))
    await eventually(lambda: decode.is_paused)
    (request_id,) = decode.running
    await gateway.sdk.cancel(request_id)
    decode.may_step.set()
    body = (await got).body.decode()
    last = json.loads(body.rstrip("\n").split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "request_cancelled"
    assert "[DONE]" not in body


async def test_a_deadline_is_504(cluster: ScriptedCluster) -> None:
    cluster.decodes["decode-0"].may_step.clear()
    async with run_gateway(cluster, request_timeout_s=0.5) as gateway:
        got = await gateway.complete(max_tokens=20)
        assert (got.status, got.error["code"]) == (504, "deadline_exceeded")


async def test_without_a_router_requests_are_503_and_health_says_so(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, request_timeout_s=1.0) as gateway:
        await gateway.router.drain()
        for got in (await gateway.complete(), await gateway.ask("/health")):
            assert (got.status, got.error["code"]) == (503, "service_unavailable")
            assert int(got.headers["retry-after"]) >= 1


async def test_a_body_that_is_no_json_object_is_400(gateway: GatewayUnderTest) -> None:
    bodies = (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"{'a': 1}", b'{"prompt": NaN}', b'{"prompt": 1e999}')
    for body in (*bodies, b'{"a":' * 5000):
        got = await gateway.ask("/v1/completions", body)
        assert got.status == 400, body[:20]
        assert got.error["message"]


def test_depth_is_limited_exactly() -> None:
    parse_object(b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")
    with pytest.raises(HttpError) as raised:
        parse_object(b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}")
    assert str(MAX_DEPTH) in raised.value.message


_NAMES = ["prompt", "messages", "model", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens"]
_NAMES += ["temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs"]
_NAMES += ["echo", "return_token_ids", "best_of", "logit_bias", "tools", "response_format", "user"]
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["kaveri-tiny", "user", "text", "\ud800", "\x00"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "a"]), inner, max_size=4),
    ),
    max_leaves=12,
)
_BODIES = st.dictionaries(st.one_of(st.sampled_from(_NAMES), st.text(max_size=8)), _VALUES, max_size=6)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_no_generated_body_is_answered_by_500(gateway: GatewayUnderTest, path: str) -> None:
    bodies: list[dict[str, Any]] = []

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(_BODIES)
    def draw(body: dict[str, Any]) -> None:
        bodies.append(body)

    draw()
    # Half of them on top of a request that would be answered, so that one wrong thing is found in each place.
    plain = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    whole = [body if number % 2 else {**plain, "max_tokens": 2, **body} for number, body in enumerate(bodies)]
    statuses = set()
    for first in range(0, len(whole), 16):
        answers = await asyncio.gather(*(gateway.ask(f"/v1/{path}", body) for body in whole[first : first + 16]))
        for body, got in zip(whole[first : first + 16], answers, strict=True):
            statuses.add(got.status)
            assert got.status in (200, 400, 404), f"{body!r}: {got.status} {got.body[:300]!r}"
            assert got.status == 200 or got.error["message"]
    assert 400 in statuses


@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_reading_raises_nothing_but_kaveris_errors(read: Any) -> None:
    @settings(max_examples=100, deadline=None, database=None)
    @given(_BODIES)
    def check(body: dict[str, Any]) -> None:
        try:
            read(body, 16)
        except InvalidArgument as error:
            http_error_of(error).body()

    check()


def test_a_request_that_the_engine_has_failed_on_is_not_tried_again() -> None:
    refused = http_error_of(EngineError("request 'r': its draw raised IndexError('7')"))
    assert (refused.status, refused.code) == (500, "engine_failed")
    assert "'r'" in refused.message
    # OpenAI's clients try any other error of a server again.
    assert (b"x-should-retry", b"false") in refused.headers


async def test_what_a_chat_template_does_to_a_conversation_is_said_by_the_messages_name(
    cluster: ScriptedCluster,
) -> None:
    plain = AutoTokenizer.from_pretrained(resolve_model("kaveri-tiny"))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    nested = "{% macro again(m) %}{{ again(m) }}{% endmacro %}{{ again(messages) }}"
    long = "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}"
    for template, param, code in (
        (users, "messages[0].content", "invalid_value"),
        (nested, "messages", "invalid_value"),
        (long, "messages", "context_length_exceeded"),
    ):
        plain.chat_template = template
        cluster.tokenizer = ModelTokenizer(plain, cluster.tokenizer.vocab_size)
        async with run_gateway(cluster) as gateway:
            for path in ("/v1/chat/completions", "/tokenize"):
                got = await gateway.ask(path, {"model": "kaveri-tiny", "messages": turns})
                assert (got.status, got.error["param"], got.error["code"]) == (400, param, code), got.body
                assert "chat template" in got.error["message"]
        cluster.tokenizer.close()


async def test_template_of_known_roles_shows_developers_and_keeps_its_own_variables(cluster: ScriptedCluster) -> None:
    plain = AutoTokenizer.from_pretrained(resolve_model("kaveri-tiny"))
    plain.chat_template = "{{ bos_token }}{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ m.content }}"
    plain.chat_template += "{% endif %}{% endfor %}"
    cluster.tokenizer = ModelTokenizer(plain, cluster.tokenizer.vocab_size)
    asked = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello"}]}
    async with run_gateway(cluster) as gateway:
        shown = (await gateway.chat(**asked, return_token_ids=True)).json["prompt_token_ids"]
        assert (await gateway.sdk.detokenize(shown)).endswith("Be brief.hello")
        for n in (1, 2):
            got = await gateway.chat(**asked, n=n, chat_template_kwargs={"bos_token": "x"})
            assert (got.status, got.error["param"]) == (400, "chat_template_kwargs.bos_token")
            assert "TypeError" not in got.error["message"]
    cluster.tokenizer.close()
