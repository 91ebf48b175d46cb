"""OpenAPI document of the HTTP API, served at /openapi.json: responses, and parameters with their limits. It lists the
usual parameters that are accepted without effect; docs/doors.md lists all. Pure."""

from typing import Any

from kaveri.domain.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TEXT_BYTES,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
)
from kaveri.parsers.tools import MAX_TOOLS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS: Schema = {"type": "array", "items": _TEXT, "minItems": 1}


def _object(properties: dict[str, Schema], required: tuple[str, ...] = (), *, is_open: bool = False) -> Schema:
    optional = {
        name: one if name in required else {"anyOf": [one, {"type": "null"}]} for name, one in properties.items()
    }
    return {"type": "object", "properties": optional, "required": [*required], "additionalProperties": is_open}


def _whole_object(properties: dict[str, Schema], *, is_open: bool = False) -> Schema:
    return _object(properties, tuple(properties), is_open=is_open)


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_TEXT_BYTES}
_STREAM_OPTIONS = _object({"include_usage": _FLAG, "continuous_usage_stats": _FLAG})
_IGNORED: dict[str, Schema] = {
    "metadata": {"type": "object"},
    "user": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
    "store": {"const": False},
}
IGNORED_OF_CHAT: dict[str, Schema] = {**_IGNORED, "verbosity": {"const": "medium"}}
_FUNCTION_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_ANY_SCHEMA: Schema = {"description": "A JSON Schema.", "anyOf": [{"type": "object"}, _FLAG]}
_NOT_EMPTY: Schema = {"type": "string", "minLength": 1}
_NOTATIONS: dict[str, Schema] = {
    "json": {"anyOf": [_ANY_SCHEMA, _NOT_EMPTY]},
    "regex": _NOT_EMPTY,
    "choice": {"type": "array", "items": _NOT_EMPTY, "minItems": 1},
    "grammar": {**_NOT_EMPTY, "description": "In Lark's notation, or llama.cpp's GBNF."},
    "json_object": _FLAG,
}
_GRAMMARS: dict[str, Schema] = {
    "response_format": {
        "anyOf": [
            _whole_object({"type": {"enum": ["text", "json_object"]}}),
            _whole_object(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": _object(
                        {"name": _TEXT, "description": _TEXT, "schema": {"type": "object"}, "strict": _FLAG}
                    ),
                }
            ),
        ],
        "description": "At most one of this, structured_outputs and the guided_ fields.",
    },
    "structured_outputs": {
        **_object({**_NOTATIONS, "disable_any_whitespace": _FLAG}),
        "description": "One of its first five fields.",
    },
    **{f"guided_{name}": schema for name, schema in _NOTATIONS.items()},
}
_TOOLS: dict[str, Schema] = {
    "tools": {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": _object(
            {
                "type": {"const": "function"},
                "function": _object(
                    {"name": _FUNCTION_NAME, "description": _TEXT, "parameters": {"type": "object"}, "strict": _FLAG},
                    ("name",),
                    is_open=True,
                ),
            },
            ("type", "function"),
            is_open=True,
        ),
        "description": "If the model's chat template takes tools.",
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            _whole_object({"type": {"const": "function"}, "function": _whole_object({"name": _FUNCTION_NAME})}),
        ]
    },
    "parallel_tool_calls": _FLAG,
    "reasoning_effort": {
        "enum": ["none", "minimal", "low", "medium", "high", "xhigh"],
        "description": 'If the model\'s chat template takes it; "none" always.',
    },
    "chat_template_kwargs": {"type": "object", "description": "Variables that the model's chat template has."},
    "continue_final_message": _FLAG,
    "add_generation_prompt": _FLAG,
}
_CALL = _object(
    {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT}, ("name",))},
    ("function",),
    is_open=True,
)
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_MESSAGE = _object(
    {
        "role": _TEXT,
        "name": {"type": "string", "description": "Taken, and not shown to the model."},
        "content": {
            "anyOf": [_TEXT, {"type": "array", "items": _whole_object({"type": {"const": "text"}, "text": _TEXT})}],
            "description": "Only an assistant's may be null, which is an empty text.",
        },
        "tool_calls": {"type": "array", "items": _CALL, "description": "Of an assistant."},
        "tool_call_id": {"type": "string", "description": "Of a tool."},
        "reasoning_content": {"type": "string", "description": "Of an assistant. Few chat templates show it."},
        "reasoning": {"type": "string", "description": "As reasoning_content."},
    },
    ("role",),
)
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_GENERATING: dict[str, Schema] = {
    "model": _TEXT,
    "n": _whole(1, MAX_N),
    "stream": _FLAG,
    "stream_options": _STREAM_OPTIONS,
    "max_tokens": {"type": "integer", "minimum": 0},
    "min_tokens": _COUNT,
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASED_TOKENS,
    },
    "bad_words": {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_BAD_WORDS},
    "allowed_token_ids": {"type": "array", "items": _COUNT, "maxItems": MAX_ALLOWED_TOKENS},
    **_GRAMMARS,
    "seed": _whole(-(2**63), 2**64 - 1),
    "stop": {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_TEXTS}]},
    "stop_token_ids": {"type": "array", "items": _COUNT, "maxItems": MAX_STOP_TOKEN_IDS},
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "prompt_logprobs": _whole(0, MAX_LOGPROBS),
    "return_token_ids": _FLAG,
}
COMPLETION = _object(
    {
        "prompt": {"anyOf": [_TEXT, _TEXTS, _TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS, "minItems": 1}]},
        **_GENERATING,
        "logprobs": _whole(0, MAX_LOGPROBS),
        "echo": _FLAG,
        "best_of": _whole(1, MAX_N),
        **_IGNORED,
    },
    ("prompt",),
)
CHAT = _object(
    {
        "messages": _MESSAGES,
        **_GENERATING,
        **_TOOLS,
        "echo": _FLAG,
        "include_reasoning": {"type": "boolean", "description": "Not false with logprobs or return_token_ids."},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, MAX_LOGPROBS),
        **IGNORED_OF_CHAT,
    },
    ("messages",),
)
TOKENIZE = _object({"model": _TEXT, "prompt": _TEXT, "messages": _MESSAGES, **_TOOLS})
DETOKENIZE = _object({"model": _TEXT, "tokens": {"type": "array", "items": _COUNT}}, ("tokens",))
_ERROR = _object(dict.fromkeys(("message", "type", "param", "code"), _TEXT), ("message", "type"), is_open=True)
_USAGE = _whole_object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT), is_open=True)
_CHOICES: Schema = {"type": "array", "items": {"type": "object"}}
_ANSWER = _object(
    {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT, "choices": _CHOICES, "usage": _USAGE},
    ("id", "object", "created", "model", "choices"),
    is_open=True,
)
_DEFAULTS: Schema = {
    "type": "object",
    "description": "What requests get for parameters that they leave out, such as temperature and max_tokens.",
}
_MODEL = _object(
    {"id": _TEXT, "object": {"const": "model"}, "default_sampling_params": _DEFAULTS}, ("id", "object"), is_open=True
)
_MODELS = _whole_object({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}})
_TOKENS = _object(
    {"count": _COUNT, "max_model_len": _COUNT, "tokens": {"type": "array", "items": _COUNT}, "token_strs": _TEXTS},
    ("count", "max_model_len", "tokens"),
)


def openapi_document(version: str) -> Schema:
    """Build the OpenAPI 3.1 document. version: Kaveri's."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kaveri", "version": version, "description": "The OpenAI-compatible HTTP API of a gateway."},
        "paths": {
            "/v1/completions": {"post": _asking("Complete prompts", COMPLETION, _ANSWER, streams=True)},
            "/v1/chat/completions": {"post": _asking("Answer a conversation", CHAT, _ANSWER, streams=True)},
            "/tokenize": {"post": _asking("The token ids of a text or a conversation", TOKENIZE, _TOKENS)},
            "/detokenize": {"post": _asking("The text of token ids", DETOKENIZE, _whole_object({"prompt": _TEXT}))},
            "/v1/models": {"get": _answering("The models that are served", _MODELS)},
            "/v1/models/{model}": {
                "get": _answering("One model", _MODEL),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": _TEXT}],
            },
            "/health": {"get": _answering("Whether requests are taken", _whole_object({"status": {"const": "ok"}}))},
            "/version": {"get": _answering("The version of Kaveri", _whole_object({"version": _TEXT}))},
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _answering(summary: str, schema: Schema) -> Schema:
    error = {
        "description": "Refused or failed, as OpenAI's errors.",
        "content": _json(_whole_object({"error": _ERROR})),
    }
    return {
        "summary": summary,
        "responses": {"200": {"description": "Done.", "content": _json(schema)}, "default": error},
    }


def _asking(summary: str, body: Schema, schema: Schema, *, streams: bool = False) -> Schema:
    operation = _answering(summary, schema)
    operation["requestBody"] = {"required": True, "content": _json(body)}
    if streams:
        # Server-sent events where `stream` is true: chunks, then "data: [DONE]".
        operation["responses"]["200"]["content"]["text/event-stream"] = {}
    return operation


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}
