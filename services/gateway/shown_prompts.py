"""Prepares the prompts that are part of a response: as text before the answers ("echo"), or as token ids."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kaveri.client.async_client import AsyncClient
from kaveri.client.request import ChatOptions, Message
from kaveri.errors import InvalidArgument
from services.gateway.parsed_request import ParsedRequest, Prompt

_LOOK_AHEAD_BYTES = 32
"""Max distance of a token from its expected offset, in bytes: tokenizers may change or drop text between tokens."""


class PromptOffsets:
    """Finds the offset of each token of a prompt in the prompt's text. Call next() for the tokens in order."""

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()
        self._position = 0
        self._characters = 0
        """Number of characters that start before the current position."""
        self._look_ahead_bytes = 0
        """Search distance; 0 for the first token, because one added by the tokenizer may occur later in the text."""

    def next(self, text: str, raw_bytes: bytes) -> int:
        """Return the next token's offset in characters; inside a character, that character's offset. A token that is
        not in the text, such as one added by the tokenizer, gets the next token's. raw_bytes: its bytes; empty: those
        of `text`."""
        token = raw_bytes or text.encode()
        bare = token.removeprefix(b" ")
        if self._position == 0 and self._bytes.startswith(bare) and not self._bytes.startswith(token):
            # Word tokenizers put a space before the first token.
            token = bare
        found = self._bytes.find(token, self._position, self._position + len(token) + self._look_ahead_bytes)
        self._look_ahead_bytes = _LOOK_AHEAD_BYTES
        if found >= 0:
            self._move(found)
        offset = self._characters - self._is_inside()
        if found >= 0:
            self._move(found + len(token))
        return offset

    def _is_inside(self) -> bool:
        return self._position < len(self._bytes) and self._bytes[self._position] & 0xC0 == 0x80

    def _move(self, position: int) -> None:
        passed = self._bytes[self._position : position]
        self._characters += sum(byte & 0xC0 != 0x80 for byte in passed)
        self._position = position


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """Text and token ids of one prompt to include in the response."""

    text: str = ""
    """The prompt's text, put before each answer; empty if not requested."""
    token_ids: tuple[int, ...] | None = None
    """The prompt's token ids; None if not requested."""


async def show_prompts(client: AsyncClient, asked: ParsedRequest) -> tuple[ParsedRequest, list[ShownPrompt]]:
    """Tokenize each prompt once if its ids are returned, its logprobs requested or n > 1. Returns the request with
    token ids as prompts, and one ShownPrompt per prompt. Raises KaveriError."""
    needs_ids = asked.return_token_ids or asked.params.prompt_logprobs is not None or asked.n > 1
    if not asked.echo and not needs_ids:
        return asked, [ShownPrompt()] * len(asked.prompts)
    if asked.chat is not None:
        return await _show_conversation(client, asked, asked.chat, needs_ids)
    try:
        async with asyncio.TaskGroup() as group:
            texts = [group.create_task(_text(client, asked, prompt)) for prompt in asked.prompts]
            asking = [group.create_task(_ids(client, asked, prompt)) for prompt in asked.prompts if needs_ids]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    ids = [task.result() for task in asking]
    if needs_ids:
        asked = replace(asked, prompts=tuple(ids))
    shown_ids: Sequence[tuple[int, ...] | None] = ids if asked.return_token_ids else [None] * len(texts)
    return asked, [ShownPrompt(text.result(), each) for text, each in zip(texts, shown_ids, strict=True)]


async def _show_conversation(
    client: AsyncClient, asked: ParsedRequest, chat: ChatOptions, needs_ids: bool
) -> tuple[ParsedRequest, list[ShownPrompt]]:
    (messages,) = asked.prompts
    text = _last_text(messages) if asked.echo else ""  # type: ignore[arg-type]
    if not needs_ids:
        return asked, [ShownPrompt(text)]
    rendered = await client.render(
        messages=messages,  # type: ignore[arg-type]
        chat=chat,
        grammar=asked.params.grammar,
        model=asked.model,
    )
    params = replace(asked.params, grammar=rendered.grammar)
    if rendered.shows_special:
        params = replace(params, skip_special_tokens=False)
    shown = ShownPrompt(text, rendered.token_ids if asked.return_token_ids else None)
    tokenized = replace(asked, prompts=(rendered.token_ids,), params=params, chat=None, form=rendered.answer_form)
    return tokenized, [shown]


def _last_text(messages: Sequence[Message]) -> str:
    """Return what vLLM's echo shows of a chat: the last message, which an answer may continue."""
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(content)


async def _text(client: AsyncClient, asked: ParsedRequest, prompt: Prompt) -> str:
    if not asked.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    try:
        return await client.detokenize(prompt, model=asked.model)  # type: ignore[arg-type]
    except InvalidArgument as error:
        raise InvalidArgument("prompt", error.value, error.limit) from error


async def _ids(client: AsyncClient, asked: ParsedRequest, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await client.tokenize(prompt, model=asked.model)
    return prompt  # type: ignore[return-value]
