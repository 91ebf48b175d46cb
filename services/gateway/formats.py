"""How answers look in OpenAI's two forms, whole and as events of a stream. Pure.

An event is put together from bytes that are made once per answer: this is done for every token.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from kaveri.client.answer import Chunk, Completion, Usage
from services.gateway.asked import Asked, UsageEvents

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that has not failed."""


def event(value: Any) -> bytes:
    """A JSON value as an event."""
    return b"data: " + encode(value) + b"\n\n"


def encode(value: Any) -> bytes:
    """A JSON value, in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


class AnswerFormat(Protocol):
    """One of the two forms, for one request."""

    def piece(self, index: int, chunk: Chunk) -> bytes:
        """The event of a chunk of the answer `index`."""

    def whole(self, answers: Sequence[Completion]) -> bytes:
        """All answers as one JSON object."""

    def usage(self) -> bytes:
        """The event that says how many tokens the stream had."""


class _Format:
    """What both forms share."""

    object_name: str
    chunk_object_name: str

    def __init__(self, asked: Asked, response_id: str, model: str, created_s: int) -> None:
        """response_id: without its prefix. created_s: seconds since 1970."""
        self._asked = asked
        self._id = response_id
        self._model = model
        self._created_s = created_s
        head = encode(self._head(self.chunk_object_name))
        self._start = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._end = {
            UsageEvents.NONE: b"}]}\n\n",
            UsageEvents.LAST: b'}],"usage":null}\n\n',
            UsageEvents.EACH: b"",
        }[asked.usage_events]
        self._usages: dict[int, Usage] = {}
        """Of the answers that have ended."""
        self._counts: dict[int, int] = {}
        """Tokens of each answer so far."""

    def usage(self) -> bytes:
        head = self._head(self.chunk_object_name)
        return event({**head, "choices": [], "usage": _usage_object(self._asked, self._usages)})

    def _head(self, object_name: str) -> dict[str, object]:
        return {"id": self._id, "object": object_name, "created": self._created_s, "model": self._model}

    def _piece(self, index: int, chunk: Chunk, middle: bytes) -> bytes:
        """middle: what stands between the choice's index and its finish reason."""
        if chunk.usage is not None:
            self._usages[index] = chunk.usage
        finish = b"null" if chunk.finish_reason is None else b'"%s"' % chunk.finish_reason.encode()
        token_ids = b',"token_ids":' + encode(chunk.token_ids) if self._asked.return_token_ids else b""
        return b'%s%d,%s,"finish_reason":%s%s%s' % (self._start, index, middle, finish, token_ids, self._end)


class CompletionFormat(_Format):
    """Of /v1/completions."""

    object_name = chunk_object_name = "text_completion"

    def piece(self, index: int, chunk: Chunk) -> bytes:
        text = encode_basestring_ascii(chunk.text).encode()
        return self._piece(index, chunk, b'"text":%s,"logprobs":null' % text)

    def whole(self, answers: Sequence[Completion]) -> bytes:
        choices = [
            {"index": index, "text": answer.text, "logprobs": None, **_end_of(self._asked, answer)}
            for index, answer in enumerate(answers)
        ]
        usages = {index: answer.usage for index, answer in enumerate(answers)}
        usage = _usage_object(self._asked, usages)
        return encode({**self._head(self.object_name), "choices": choices, "usage": usage})


class ChatFormat(_Format):
    """Of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, asked: Asked, response_id: str, model: str, created_s: int) -> None:
        super().__init__(asked, response_id, model, created_s)
        self._begun: set[int] = set()

    def piece(self, index: int, chunk: Chunk) -> bytes:
        text = encode_basestring_ascii(chunk.text).encode()
        if index in self._begun:
            return self._piece(index, chunk, b'"delta":{"content":%s},"logprobs":null' % text)
        self._begun.add(index)
        return self._piece(index, chunk, b'"delta":{"role":"assistant","content":%s},"logprobs":null' % text)

    def whole(self, answers: Sequence[Completion]) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": None,
                **_end_of(self._asked, answer),
            }
            for index, answer in enumerate(answers)
        ]
        usages = {index: answer.usage for index, answer in enumerate(answers)}
        usage = _usage_object(self._asked, usages)
        return encode({**self._head(self.object_name), "choices": choices, "usage": usage})


def _end_of(asked: Asked, answer: Completion) -> dict[str, object]:
    token_ids = {"token_ids": answer.token_ids} if asked.return_token_ids else {}
    return {"finish_reason": answer.finish_reason, **token_ids}


def _usage_object(asked: Asked, usages: dict[int, Usage]) -> dict[str, int]:
    """The sum of all answers. A prompt with several answers counts once."""
    prompt_tokens = sum(usage.prompt_tokens for index, usage in usages.items() if index % asked.n == 0)
    completion_tokens = sum(usage.completion_tokens for usage in usages.values())
    return usage_object(prompt_tokens, completion_tokens)


def usage_object(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
