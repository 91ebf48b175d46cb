"""Every parameter of openai-python's chat and completions: each works, or is refused by its name. A new release with a
new parameter fails here until it has samples."""

import typing
from typing import Any

import pytest
from openai.types.chat import completion_create_params as of_chat
from openai.types.completion_create_params import CompletionCreateParamsBase

from tests.services.gateway.conftest import GatewayUnderTest

_SCHEMA = {"name": "s", "schema": {"type": "object"}, "strict": True}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USER = {"role": "user", "content": "hello"}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
_AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
_FILE = {"type": "file", "file": {"file_id": "f"}}
WORKS: dict[str, list[dict[str, Any]]] = {
    "frequency_penalty": [{"frequency_penalty": 0.5}],
    "function_call": [{"functions": [{"name": "f"}], "function_call": "none"}],
    "functions": [{"functions": []}],
    "logit_bias": [{"logit_bias": {"300": 5}}],
    "logprobs": [{"logprobs": True}, {"logprobs": False}],
    "max_completion_tokens": [{"max_tokens": None, "max_completion_tokens": 4}],
    "max_tokens": [{"max_tokens": 4}],
    "messages": [
        {"messages": [{"role": "developer", "content": "be short"}, _USER]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {**_USER, "name": "ann"}]},
        {"messages": [_USER, {"role": "assistant", "content": None, "refusal": None, "tool_calls": [_CALL]}, _USER]},
        {
            "messages": [
                _USER,
                {"role": "assistant", "content": "a"},
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ]
        },
    ],
    "metadata": [{"metadata": {"a": "b"}}],
    "modalities": [{"modalities": ["text"]}],
    "model": [{"model": "kaveri-tiny"}],
    "n": [{"n": 2}],
    "parallel_tool_calls": [{"tools": [_TOOL], "parallel_tool_calls": False}],
    "presence_penalty": [{"presence_penalty": -0.5}],
    "prompt_cache_key": [{"prompt_cache_key": "k"}],
    "prompt_cache_retention": [{"prompt_cache_retention": "24h"}],
    "reasoning_effort": [{"reasoning_effort": "none"}],
    "response_format": [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
    ],
    "safety_identifier": [{"safety_identifier": "s"}],
    "seed": [{"seed": 3}],
    "service_tier": [{"service_tier": "auto"}, {"service_tier": "default"}],
    "stop": [{"stop": "x"}, {"stop": ["x", "y"]}, {"stop": None}],
    "store": [{"store": False}],
    "stream_options": [
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": padded}}
        for padded in (False, True)
    ],
    "temperature": [{"temperature": 1.5}],
    "tool_choice": [
        {"tools": [_TOOL], "tool_choice": choice}
        for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "f"}})
    ],
    "tools": [{"tools": [_TOOL]}],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 2}],
    "top_p": [{"top_p": 0.5}],
    "user": [{"user": "u"}],
    "verbosity": [{"verbosity": "medium"}],
    "best_of": [{"best_of": 1}, {"best_of": 2, "n": 2}],
    "echo": [{"echo": True}],
    "prompt": [{"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": [300, 301]}, {"prompt": [[300], [301]]}],
    "suffix": [{"suffix": ""}],
}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "audio": [{"audio": {"voice": "a", "format": "wav"}}],
    "function_call": [{"function_call": "auto"}],
    "functions": [{"functions": [{"name": "f"}]}],
    "messages": [{"messages": [{"role": "user", "content": [part]}]} for part in (_IMAGE, _AUDIO, _FILE)],
    "modalities": [{"modalities": ["text", "audio"]}],
    "moderation": [{"moderation": {"model": "m"}}],
    "prediction": [{"prediction": {"type": "content", "content": "x"}}],
    "prompt_cache_options": [{"prompt_cache_options": {"mode": "explicit"}}],
    "reasoning_effort": [{"reasoning_effort": "high"}],
    "service_tier": [{"service_tier": "priority"}],
    "store": [{"store": True}],
    "suffix": [{"suffix": "end"}],
    "tools": [{"tools": [{"type": "custom", "custom": {"name": "f"}}]}],
    "verbosity": [{"verbosity": "low"}],
    "web_search_options": [{"web_search_options": {}}],
    "best_of": [{"best_of": 3}],
}
_LONG = {"max_tokens": 5, "temperature": 0}


@pytest.mark.parametrize("door", ["chat", "completions"])
async def test_every_parameter_of_openai_works_or_is_refused_by_name(gateway: GatewayUnderTest, door: str) -> None:
    params = of_chat.CompletionCreateParamsBase if door == "chat" else CompletionCreateParamsBase
    path, plain = "/v1/completions", {"prompt": "a", **_LONG}
    if door == "chat":
        path, plain = "/v1/chat/completions", {"messages": [_USER], **_LONG}
    for name in typing.get_type_hints(params):
        assert name in WORKS or name in REFUSED, f"{name} of {door} has no sample"
        is_number = door == "completions" and name == "logprobs"
        for fields in [{"logprobs": 2}] if is_number else WORKS.get(name, []):
            answer = await gateway.ask(path, plain | fields)
            assert answer.status == 200, (fields, answer.body)
        for fields in REFUSED.get(name, []):
            answer = await gateway.ask(path, plain | fields)
            assert answer.status == 400, (fields, answer.body)
            assert name.rstrip("s") in answer.error["param"], (fields, answer.body)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/images/generations", "/v1/messages"])
async def test_other_paths_of_openai_say_why_they_are_not_here(gateway: GatewayUnderTest, path: str) -> None:
    answer = await gateway.ask(path, {"input": "x"})
    assert answer.status == 404
    assert "is not served here" in answer.error["message"]
    assert "text" in answer.error["message"] or "smg" in answer.error["message"]
