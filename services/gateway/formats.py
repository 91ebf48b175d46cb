"""How answers look in OpenAI's two forms, whole and as events of a stream. Pure.

An event is put together from bytes that are made once per answer: this is done for every token.
"""

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from kaveri.client.answer import Chunk, Completion, PromptToken, Usage
from kaveri.domain.sampling import Logprobs
from services.gateway.asked import Asked, UsageEvents
from services.gateway.shown_prompts import ShownPrompt

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that has not failed."""
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM writes this for it."""


def encode(value: Any) -> bytes:
    """A JSON value, in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


class AnswerFormat:
    """The answers to one request. Its subclasses are the two forms."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(
        self, asked: Asked, shown: Sequence[ShownPrompt], response_id: str, model: str, created_s: int
    ) -> None:
        """response_id: without its prefix. created_s: seconds since 1970."""
        self._asked = asked
        self._shown = shown
        self._head = {"id": f"{self.id_prefix}-{response_id}", "created": created_s, "model": model}
        chunk_head = encode({**self._head, "object": self.chunk_object_name})
        self._start = b"data: " + chunk_head[:-1]
        self._end = b'}],"usage":null}\n\n' if asked.usage_events is UsageEvents.LAST else b"}]}\n\n"
        self._usages: dict[int, Usage] = {}
        """Of the answers that have ended."""
        self._counts: dict[int, int] = {}
        """Tokens of each answer so far."""
        self._offsets: dict[int, int] = {}
        """Characters of the tokens that reports have named."""
        self._prompts: dict[int, list[PromptToken]] = {}
        """Reports on prompts with several answers, by the index of the first one."""

    def piece(self, index: int, chunk: Chunk, prompt_tokens: int) -> bytes:
        """The event of a chunk of the answer `index`."""
        is_first = index not in self._counts
        count = self._counts[index] = self._counts.get(index, 0) + len(chunk.token_ids)
        if chunk.usage is not None:
            self._usages[index] = chunk.usage
        finish = b"null" if chunk.finish_reason is None else b'"%s"' % chunk.finish_reason.encode()
        # Both are null, or empty, for most requests.
        prompt = self._prompt_of(index, chunk, is_first) if self._asked.echoes_logprobs else ()
        report = b"null" if not chunk.logprobs and not prompt else encode(self._report(index, chunk.logprobs, prompt))
        token_ids = b',"token_ids":' + encode(chunk.token_ids) if self._asked.return_token_ids else b""
        text = chunk.text
        top, beside = b"", b""
        if is_first:
            shown = self._shown_of(index)
            text = shown.text + text
            top, beside = self._prompt_ids(shown)
        end = self._end
        if self._asked.usage_events is UsageEvents.EACH:
            end = b'}],"usage":%s}\n\n' % encode(_usage_object(prompt_tokens, count))
        message = self._delta(encode_basestring_ascii(text).encode(), is_first)
        return b'%s%s,"choices":[{"index":%d,%s,"logprobs":%s,"finish_reason":%s%s%s%s' % (
            self._start,
            top,
            index,
            message,
            report,
            finish,
            token_ids,
            beside,
            end,
        )

    def usage(self) -> bytes:
        """The event that says how many tokens the stream had."""
        usage = self._sum(self._usages)
        return (
            b"data: "
            + encode({**self._head, "object": self.chunk_object_name, "choices": [], "usage": usage})
            + b"\n\n"
        )

    def whole(self, answers: Sequence[Completion]) -> bytes:
        """All answers as one JSON object."""
        choices = []
        top: dict[str, object] = {}
        for index, answer in enumerate(answers):
            shown = self._shown_of(index)
            reported = answers[self._first_of(index)].prompt_tokens
            prompt = reported if self._asked.echoes_logprobs else ()
            wants_report = self._asked.params.logprobs is not None
            choice: dict[str, object] = {
                "index": index,
                **self._message(shown.text + answer.text),
                "logprobs": self._report(index, answer.logprobs, prompt) if wants_report else None,
                "finish_reason": answer.finish_reason,
            }
            if self._asked.prompt_logprobs:
                beside = choice if self._ids_beside_choices else top
                beside["prompt_logprobs"] = [_prompt_position(token) for token in reported]
            if self._asked.return_token_ids:
                choice["token_ids"] = answer.token_ids
                (choice if self._ids_beside_choices else top)["prompt_token_ids"] = shown.token_ids
            choices.append(choice)
        usage = self._sum({index: answer.usage for index, answer in enumerate(answers)})
        return encode({**self._head, "object": self.object_name, "choices": choices, "usage": usage, **top})

    _ids_beside_choices: bool
    """Whether a prompt's token ids, and what is said of them, are part of each choice, else of the whole."""

    def _message(self, text: str) -> dict[str, object]:
        """The part of a choice that holds its text."""
        raise NotImplementedError

    def _delta(self, text: bytes, is_first: bool) -> bytes:
        """The same of an event. text: as JSON."""
        raise NotImplementedError

    def _report(self, index: int, logprobs: Sequence[Logprobs], prompt: Sequence[PromptToken]) -> dict[str, object]:
        """What the model thought of the tokens that come next in the answer `index`. prompt: tokens of the prompt that
        come before them."""
        raise NotImplementedError

    def _shown_of(self, index: int) -> ShownPrompt:
        return self._shown[index // self._asked.n]

    def _first_of(self, index: int) -> int:
        """The index of the first answer to the same prompt, which has the report on it."""
        return index - index % self._asked.n

    def _prompt_of(self, index: int, chunk: Chunk, is_first: bool) -> Sequence[PromptToken]:
        """What a chunk reports on the prompt. The first one of a later answer has all of it."""
        if self._asked.n == 1:
            return chunk.prompt_tokens
        first = self._first_of(index)
        if index == first:
            self._prompts.setdefault(index, []).extend(chunk.prompt_tokens)
            return chunk.prompt_tokens
        return self._prompts[first] if is_first else ()

    def _prompt_ids(self, shown: ShownPrompt) -> tuple[bytes, bytes]:
        """A prompt's token ids, for the top of an event or for its choice."""
        if shown.token_ids is None:
            return b"", b""
        ids = b',"prompt_token_ids":' + encode(shown.token_ids)
        return (b"", ids) if self._ids_beside_choices else (ids, b"")

    def _sum(self, usages: Mapping[int, Usage]) -> dict[str, int]:
        """A prompt with several answers counts once."""
        prompt_tokens = sum(usage.prompt_tokens for index, usage in usages.items() if index % self._asked.n == 0)
        return _usage_object(prompt_tokens, sum(usage.completion_tokens for usage in usages.values()))


class CompletionFormat(AnswerFormat):
    """Of /v1/completions."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"
    _ids_beside_choices = True

    def _message(self, text: str) -> dict[str, object]:
        return {"text": text}

    def _delta(self, text: bytes, is_first: bool) -> bytes:
        return b'"text":' + text

    def _report(self, index: int, logprobs: Sequence[Logprobs], prompt: Sequence[PromptToken]) -> dict[str, object]:
        tokens = [token.text for token in prompt] + [entry.text for entry in logprobs]
        # None: the prompt's first token, before which nothing comes.
        entries = [*(token.logprobs for token in prompt), *logprobs]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else _by_text(entry) for entry in entries],
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    """Of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    _ids_beside_choices = False

    def _message(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: bytes, is_first: bool) -> bytes:
        return b'"delta":{%s"content":%s}' % (b'"role":"assistant",' if is_first else b"", text)

    def _report(self, index: int, logprobs: Sequence[Logprobs], prompt: Sequence[PromptToken]) -> dict[str, object]:
        content = [
            {**_token(entry.text, entry.logprob), "top_logprobs": [_token(text, value) for text, value in _top(entry)]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}


def _prompt_position(token: PromptToken) -> dict[str, object] | None:
    """As vLLM shows it: by token id. The rank of a token that is none of the likeliest ones is not known."""
    entry = token.logprobs
    if entry is None:
        return None
    shown: dict[str, object] = {str(token.token_id): _ranked(entry.logprob, None, token.text)}
    texts = (text for text, _ in _top(entry))
    for rank, (text, (token_id, value)) in enumerate(zip(texts, entry.top, strict=True), 1):
        shown[str(token_id)] = _ranked(value, rank, text)
    return shown


def _ranked(logprob: float, rank: int | None, text: str) -> dict[str, object]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}


def _token(text: str, logprob: float) -> dict[str, object]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _top(entry: Logprobs) -> list[tuple[str, float]]:
    texts = entry.top_texts or ("",) * len(entry.top)
    return [(text, value) for text, (_, value) in zip(texts, entry.top, strict=True)]


def _by_text(entry: Logprobs) -> dict[str, float]:
    """The likeliest tokens and the token itself, which may be none of them. Of tokens with the same text, such as
    pieces of one character, the likeliest counts."""
    found: dict[str, float] = {}
    for text, value in (*_top(entry), (entry.text, entry.logprob)):
        found[text] = max(_finite(value), found.get(text, _LEAST_LOGPROB))
    return found


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LEAST_LOGPROB else _LEAST_LOGPROB


def _usage_object(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
