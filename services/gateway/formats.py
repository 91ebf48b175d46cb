"""Formats answers as OpenAI's API does: as one JSON object, or as server-sent events. Pure. Events are joined from
bytes that are encoded once per answer, because this runs for every token."""

import json
import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

from kaveri.client.answer import Chunk, PromptToken, Usage
from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.parsers.answer import PLAIN, AnswerForm, AnswerParser
from kaveri.parsers.parts import Content, Part, Reasoning, ToolCall
from services.gateway.parsed_request import ParsedRequest, UsageEvents
from services.gateway.shown_prompts import PromptOffsets, ShownPrompt

DONE = b"data: [DONE]\n\n"
"""Last event of a stream without errors."""
ItemT = TypeVar("ItemT")
_SLICE_TOKENS = 256
"""Tokens whose logprobs are encoded at a time: about 5 ms with 20 log-probabilities per token."""
_LEAST_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON lacks; the same as vLLM's."""


def encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _items(values: list[Any]) -> bytes:
    return encode(values)[1:-1]


def _slices(items: Sequence[ItemT]) -> Iterator[Sequence[ItemT]]:
    for start in range(0, len(items), _SLICE_TOKENS):
        yield items[start : start + _SLICE_TOKENS]


@dataclass(slots=True)
class _Answer:
    """State of one answer while it is formatted. Logprobs are stored as encoded JSON, which takes less memory."""

    # Flat containers: the garbage collector visits each item of a list, which would block the event loop.
    text: StringIO = field(default_factory=StringIO)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    report: dict[str, list[bytes] | bytes] = field(default_factory=dict)
    """Fields of the choice's "logprobs" object as encoded JSON: a list's items, or one value."""
    prompt_logprobs: list[bytes] = field(default_factory=list)
    finish: str | None = None
    usage: Usage | None = None
    shows_reasoning: bool = True
    begun: bool = False
    """True once a chunk of the answer was formatted."""
    token_count: int = 0
    """Number of tokens in the events so far."""
    prompt: list[PromptToken] = field(default_factory=list)
    """Logprobs of the prompt, kept in its first answer and repeated in the others."""
    parser: AnswerParser | None = None
    """Reads tool calls and reasoning; None: not begun, or the text has none."""
    reasoning: StringIO = field(default_factory=StringIO)
    calls: list[ToolCall] = field(default_factory=list)
    offsets: PromptOffsets | None = None
    """Finds the prompt tokens' offsets if the answer begins with the prompt ("echo") and has logprobs."""

    def add_report(self, report: Mapping[str, object]) -> None:
        for name, value in report.items():
            if isinstance(value, list):
                items = self.report.setdefault(name, [])
                if value and isinstance(items, list):
                    items.append(_items(value))
            else:
                self.report[name] = encode(value)

    def read(self, chunk: Chunk, form: AnswerForm) -> list[Part]:
        """Return the parts that a chunk's text decides, without reasoning that is not shown."""
        if self.parser is None:
            self.parser = form.parser()
        parts = list(self.parser.feed(chunk.text))
        if chunk.finish_reason is not None:
            parts += self.parser.close()
        return parts if self.shows_reasoning else [part for part in parts if not isinstance(part, Reasoning)]

    def take(self, chunk: Chunk, form: AnswerForm) -> None:
        """Append a chunk's text to the answer: content, reasoning and tool calls."""
        if form is PLAIN or form == PLAIN:
            self.text.write(chunk.text)
            return
        for part in self.read(chunk, form):
            match part:
                case Content(text):
                    self.text.write(text)
                case Reasoning(text):
                    self.reasoning.write(text)
                case ToolCall():
                    self.calls.append(part)

    def finish_of(self, chunk: Chunk, last: Part | None = None) -> str:
        """Return the finish_reason of OpenAI's API for the last chunk. last: a part that is not stored yet."""
        assert chunk.finish_reason is not None
        calls = self.calls or isinstance(last, ToolCall)
        return "tool_calls" if calls and chunk.finish_reason is FinishReason.STOP else chunk.finish_reason

    def report_parts(self) -> list[bytes]:
        parts: list[bytes] = []
        for name, value in self.report.items():
            parts += [b"," if parts else b"{", encode(name), b":"]
            parts += [b"[", b",".join(value), b"]"] if isinstance(value, list) else [value]
        return [*parts, b"}"]


class AnswerFormat:
    """Formatter of all answers to one HTTP request. Base class: subclasses for completions and for chat."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(
        self, asked: ParsedRequest, shown: Sequence[ShownPrompt], response_id: str, model: str, created_s: int
    ) -> None:
        """shown: one per prompt. response_id: the "id" without its prefix such as "cmpl-". created_s: Unix time."""
        self._asked = asked
        self._shown = shown
        self._head = {"id": f"{self.id_prefix}-{response_id}", "created": created_s, "model": model}
        chunk_head = encode({**self._head, "object": self.chunk_object_name})
        self._start = b"data: " + chunk_head[:-1]
        self._end = b'}],"usage":null}\n\n' if asked.usage_events is UsageEvents.LAST else b"}]}\n\n"
        self._answers = [_Answer(shows_reasoning=asked.shows_reasoning) for _ in range(len(asked.prompts) * asked.n)]

    def events(self, index: int, chunk: Chunk, prompt_tokens: int, form: AnswerForm = PLAIN) -> Iterator[bytes]:
        """Yield the encoded events for a chunk of answer `index`; several only if it has many prompt logprobs, or text
        of several kinds. form: how the text is read."""
        last: Part | None = None
        # Most answers are text alone, and this runs for every token.
        if form is not PLAIN and form != PLAIN:
            parts = self._answers[index].read(chunk, form)
            if self._asked.echo and not self._answers[index].begun:
                # The echo is content, whatever the answer begins with.
                parts.insert(0, Content(""))
            if not parts and self._answers[index].begun and not self._shows_tokens and chunk.finish_reason is None:
                return
            *others, last = parts or [Content("")]
            before = replace(chunk, token_ids=(), text="", logprobs=(), finish_reason=None, usage=None)
            for part in others:
                yield self._event(index, before, (), prompt_tokens, part)
        # Prompt logprobs are null, or empty, for most requests.
        prompt = self._prompt_of(index, chunk) if self._asked.echoes_logprobs else ()
        while len(prompt) > _SLICE_TOKENS:
            before = replace(chunk, token_ids=(), text="", logprobs=(), finish_reason=None, usage=None)
            yield self._event(index, before, prompt[:_SLICE_TOKENS], prompt_tokens)
            prompt = prompt[_SLICE_TOKENS:]
        yield self._event(index, chunk, prompt, prompt_tokens, last)

    @property
    def _shows_tokens(self) -> bool:
        """True if events have something of each token beside its text."""
        asked = self._asked
        each_usage = asked.usage_events is UsageEvents.EACH
        return each_usage or asked.return_token_ids or asked.params.logprobs is not None

    def _event(
        self,
        index: int,
        chunk: Chunk,
        prompt: Sequence[PromptToken],
        prompt_tokens: int,
        part: Part | None = None,
    ) -> bytes:
        """Encode one event. part: in place of the chunk's text."""
        answer = self._answers[index]
        is_first, answer.begun = not answer.begun, True
        answer.token_count += len(chunk.token_ids)
        answer.usage = chunk.usage or answer.usage
        finish = b"null" if chunk.finish_reason is None else b'"%s"' % answer.finish_of(chunk, part).encode()
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
            end = b'}],"usage":%s}\n\n' % encode(_usage_object(prompt_tokens, answer.token_count))
        if part is None:
            message = self._delta(encode_basestring_ascii(text).encode(), is_first)
        else:
            message = self._delta_of(part, index, is_first)
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
        """Return the last event, with the token counts of all answers; empty if the client did not ask for it."""
        if self._asked.usage_events is UsageEvents.NONE:
            return b""
        usage = {"object": self.chunk_object_name, "choices": [], "usage": self._usage_sum()}
        return b"data: " + encode({**self._head, **usage}) + b"\n\n"

    def gather(self, index: int, chunk: Chunk, form: AnswerForm = PLAIN) -> Iterator[None]:
        """Store a chunk of answer `index` for whole(). form: how the text is read. Yields after each slice of logprobs,
        to free the event loop."""
        answer = self._answers[index]
        answer.take(chunk, form)
        if self._asked.return_token_ids:
            answer.token_ids.extend(chunk.token_ids)
        answer.finish = None if chunk.finish_reason is None else answer.finish_of(chunk)
        answer.usage = chunk.usage or answer.usage
        if self._asked.prompt_logprobs:
            for part in _slices(chunk.prompt_tokens):
                answer.prompt_logprobs.append(_items([_prompt_position(token) for token in part]))
                yield
        prompt = self._prompt_of(index, chunk) if self._asked.echoes_logprobs else ()
        answer.begun = True
        for part in _slices(prompt):
            answer.add_report(self._report(index, (), part))
            yield
        for entries in _slices(chunk.logprobs):
            answer.add_report(self._report(index, entries, ()))
            yield

    def whole(self) -> Iterator[bytes]:
        """Yield the response as parts of one JSON object. gather() must have received all chunks of all answers."""
        yield encode({**self._head, "object": self.object_name, "usage": self._usage_sum()})[:-1]
        ids = b""
        for index, answer in enumerate(self._answers):
            shown, first = self._shown_of(index), self._first_of(index)
            if answer is first and self._asked.return_token_ids:
                ids = encode(shown.token_ids)
            choice: dict[str, object] = {
                "index": index,
                **self._message(shown.text + answer.text.getvalue(), answer.reasoning.getvalue(), answer.calls),
                "finish_reason": answer.finish,
            }
            parts = [b',"choices":[' if index == 0 else b",", encode(choice)[:-1], b',"logprobs":']
            if self._asked.params.logprobs is None:
                parts.append(b"null")
            else:
                answer.add_report(self._report(index, (), ()))
                parts += answer.report_parts()
            if self._asked.return_token_ids:
                parts += [b',"token_ids":', encode(answer.token_ids.tolist())]
            if self._ids_beside_choices:
                parts += self._about_prompt(first, ids)
            yield b"".join([*parts, b"}"])
        last = b"" if self._ids_beside_choices else b"".join(self._about_prompt(self._answers[0], ids))
        yield b"]" + last + b"}"

    def _about_prompt(self, first: _Answer, ids: bytes) -> list[bytes]:
        """Encode the requested fields of a prompt: its logprobs, from its first answer, and its token ids (JSON)."""
        parts: list[bytes] = []
        if self._asked.prompt_logprobs:
            parts += [b',"prompt_logprobs":[', b",".join(first.prompt_logprobs), b"]"]
        if self._asked.return_token_ids:
            parts += [b',"prompt_token_ids":', ids]
        return parts

    _ids_beside_choices: bool
    """True if a prompt's token ids and logprobs are fields of each choice; False: of the response."""

    def _message(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        raise NotImplementedError

    def _delta_of(self, part: Part, index: int, is_first: bool) -> bytes:
        raise NotImplementedError

    def _delta(self, text: bytes, is_first: bool) -> bytes:
        raise NotImplementedError

    def _report(self, index: int, logprobs: Sequence[Logprobs], prompt: Sequence[PromptToken]) -> dict[str, object]:
        """Build the "logprobs" of the next tokens of answer `index`. prompt: echoed prompt tokens before them."""
        raise NotImplementedError

    def _shown_of(self, index: int) -> ShownPrompt:
        return self._shown[index // self._asked.n]

    def _first_of(self, index: int) -> _Answer:
        return self._answers[index - index % self._asked.n]

    def _prompt_of(self, index: int, chunk: Chunk) -> Sequence[PromptToken]:
        """Return the prompt tokens to report with a chunk: the chunk's own in a prompt's first answer; in its other
        answers, all of them with their first chunk."""
        answer, first = self._answers[index], self._first_of(index)
        if answer is not first:
            return () if answer.begun else first.prompt
        if self._asked.n > 1:
            answer.prompt.extend(chunk.prompt_tokens)
        return chunk.prompt_tokens

    def _prompt_ids(self, shown: ShownPrompt) -> tuple[bytes, bytes]:
        """Encode a prompt's token ids as a pair: fields of the event, fields of its choice. One of them is empty."""
        if shown.token_ids is None:
            return b"", b""
        ids = b',"prompt_token_ids":' + encode(shown.token_ids)
        return (b"", ids) if self._ids_beside_choices else (ids, b"")

    def _usage_sum(self) -> dict[str, object]:
        usages = [answer.usage for answer in self._answers]
        return _usage_object(
            sum(usage.prompt_tokens for usage in usages[:: self._asked.n] if usage),
            sum(usage.completion_tokens for usage in usages if usage),
            sum(usage.cached_tokens for usage in usages[:: self._asked.n] if usage),
        )


class CompletionFormat(AnswerFormat):
    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"
    _ids_beside_choices = True

    def _message(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        return {"text": text}

    def _delta(self, text: bytes, is_first: bool) -> bytes:
        return b'"text":' + text

    def _report(self, index: int, logprobs: Sequence[Logprobs], prompt: Sequence[PromptToken]) -> dict[str, object]:
        text, answer = self._shown_of(index).text, self._answers[index]
        answer.offsets = in_prompt = answer.offsets or PromptOffsets(text)
        offsets = [in_prompt.next(token.text, token.raw_bytes) for token in prompt]
        offsets += [len(text) + entry.text_offset for entry in logprobs]
        tokens = [token.text for token in prompt] + [entry.text for entry in logprobs]
        # None for the prompt's first token, which nothing precedes.
        entries = [*(token.logprobs for token in prompt), *logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else _by_text(entry) for entry in entries],
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    _ids_beside_choices = False

    def _message(self, text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call_object(call) for call in calls]}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {"message": message}

    def _delta_of(self, part: Part, index: int, is_first: bool) -> bytes:
        answer, delta = self._answers[index], dict[str, object]()
        if is_first:
            delta["role"] = "assistant"
        match part:
            case Content(text):
                delta["content"] = self._shown_of(index).text + text if is_first else text
            case Reasoning(text):
                delta["reasoning_content"] = text
            case ToolCall():
                delta["tool_calls"] = [{"index": len(answer.calls), **_call_object(part)}]
                answer.calls.append(part)
        return b'"delta":' + encode(delta)

    def _delta(self, text: bytes, is_first: bool) -> bytes:
        return b'"delta":{%s"content":%s}' % (b'"role":"assistant",' if is_first else b"", text)

    def _report(self, index: int, logprobs: Sequence[Logprobs], prompt: Sequence[PromptToken]) -> dict[str, object]:
        content = [
            {
                **_token(entry.text, entry.raw_bytes, entry.logprob),
                "top_logprobs": [
                    _token(text, raw_bytes, value)
                    for (text, value), raw_bytes in zip(_top(entry), entry.top_raw_bytes, strict=False)
                ],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}


def _call_object(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _prompt_position(token: PromptToken) -> dict[str, object] | None:
    """Build vLLM's prompt_logprobs of one token, by token id. Its own rank is None unless among the top ones."""
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


def _token(text: str, raw_bytes: bytes, logprob: float) -> dict[str, object]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw_bytes or text.encode())}


def _top(entry: Logprobs) -> list[tuple[str, float]]:
    texts = entry.top_texts or ("",) * len(entry.top)
    return [(text, value) for text, (_, value) in zip(texts, entry.top, strict=True)]


def _by_text(entry: Logprobs) -> dict[str, float]:
    """Map the text of top tokens and the token itself to log-probabilities; of equal texts, the likeliest counts."""
    found: dict[str, float] = {}
    for text, value in (*_top(entry), (entry.text, entry.logprob)):
        found[text] = max(_finite(value), found.get(text, _LEAST_LOGPROB))
    return found


def _finite(logprob: float) -> float:
    return logprob if logprob >= _LEAST_LOGPROB else _LEAST_LOGPROB


def _usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, object]:
    """cached_tokens: None while they are not known."""
    details = {} if cached_tokens is None else {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }
