"""Converts text and conversations to token ids with the model's own tokenizer. Does not import torch."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from kaveri.domain.sampling import check_token_ids
from kaveri.errors import ConfigError, DeadlineExceeded, InvalidArgument
from kaveri.models import resolve_model
from kaveri.telemetry.logs import get_logger
from kaveri.text.chat_template import ChatTemplate, MissingText, RenderedTurn, RenderOptions
from kaveri.text.content_format import ContentFormat
from kaveri.text.control_tokens import ControlTokens
from kaveri.text.conversation import Conversation, Turn, fields_of, marked_values
from kaveri.text.detokenizer import Detokenizer, plain_texts
from kaveri.text.token_texts import TokenPiece, TokenTexts

ResultT = TypeVar("ResultT")
_INLINE_CHARACTERS = 1_024
"""Max length of prompts tokenized on the event loop: less than a millisecond. Longer ones use a thread."""
_INLINE_MESSAGES = 16
_END_CHARACTERS = 64
MAX_ROLE_CHARACTERS = 64
_MARKED_CHARACTERS = 9
"""Max length of a character with the marker that ControlTokens puts after it."""


class ModelTokenizer:
    """Tokenizer of one model, for an event loop. close() ends its threads.

    Short input is tokenized on the event loop, longer input on a thread, where a call holds the GIL for a few
    milliseconds at most, except to list the ids.

    Work whose deadline has passed is not begun, and a conversation stops at its next step. A running call of the
    tokenizer cannot be interrupted; the limit on input bounds it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, content_format: ContentFormat = ContentFormat.AUTO
    ) -> None:
        """vocab_size: number of embeddings. content_format: how the chat template receives message content."""
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        # A tokenizer.json may keep both settings from its training. They would truncate or pad prompts.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocab_size = vocab_size
        """Size of the model's vocabulary, which may be padded beyond the tokenizer's."""
        vocabulary = self.backend.get_vocab()
        self.unknown_tokens = {token: token_id for token, token_id in vocabulary.items() if token_id >= vocab_size}
        """Tokens with ids beyond the model's vocabulary. Text that contains one is refused."""
        self.longest_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)
        """UTF-8 size of the longest token, for the limit on input: that many bytes per token."""
        self.chat_template = ChatTemplate(tokenizer, content_format) if tokenizer.chat_template else None
        added = self.backend.get_added_tokens_decoder()
        self._skipped_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._plain = plain_texts(self.backend, self._skipped_ids)
        self._token_texts = TokenTexts(self.backend)
        self._control = ControlTokens(self.backend, self.chat_template.samples()) if self.chat_template else None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, model: str, content_format: ContentFormat = ContentFormat.AUTO) -> "ModelTokenizer":
        """Load from a path, a hub id or a bundled name. Blocks for seconds. Raises ConfigError, naming --model."""
        source = resolve_model(model)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            vocab_size = int(AutoConfig.from_pretrained(source).get_text_config().vocab_size)
        except Exception as error:  # any exception type: files of others are parsed here
            # The first line states the error; the rest is advice about hub tokens and caches.
            first_line = str(error).partition("\n")[0].rstrip(": ") or type(error).__name__
            if first_line.endswith("one of"):
                first_line = "its folder holds no tokenizer.json, and no files that one can be made of"
            raise ConfigError("--model", f"{model!r} has no tokenizer that can be loaded: {first_line}") from error
        if not tokenizer.is_fast:
            raise ConfigError("--model", f"{model!r} has no tokenizer.json (a fast tokenizer)")
        made = cls(tokenizer, vocab_size, content_format)
        if made.unknown_tokens:
            token, token_id = min(made.unknown_tokens.items(), key=lambda item: item[1])
            get_logger().warning(
                "tokenizer_exceeds_vocabulary",
                token_count=len(made.unknown_tokens),
                first_token=token,
                first_token_id=token_id,
                vocab_size=made.vocab_size,
            )
        return made

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def close(self) -> None:
        """Stop the threads; pending calls are cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        known_characters: int = 0,
        *,
        skip_special_tokens: bool = True,
    ) -> Detokenizer:
        """Build a detokenizer for one answer to a prompt; parameters as for Detokenizer."""
        return Detokenizer(
            self.backend,
            stop,
            min_tokens=min_tokens,
            prompt_token_ids=prompt_token_ids,
            skipped_ids=self._skipped_ids if skip_special_tokens else (),
            plain=self._plain,
            known_characters=known_characters,
        )

    async def encode(self, text: str, max_tokens: int, deadline_s: float) -> list[int]:
        """Encode a prompt, with the special tokens that the tokenizer adds; special tokens in the text count as such.
        Raises InvalidArgument for more than `max_tokens`, for more bytes than these can have, and for a token the model
        lacks; DeadlineExceeded when time.monotonic() reaches `deadline_s`."""
        self._check_size("prompt.text", len(text.encode()), max_tokens)
        short = len(text) <= _INLINE_CHARACTERS
        return await self._run(
            short, deadline_s, lambda: self._ids("prompt.text", text, max_tokens, self.backend, add_special_tokens=True)
        )

    async def decode(self, token_ids: Sequence[int], deadline_s: float) -> str:
        """Decode token ids, including special tokens. Raises InvalidArgument for ids outside the vocabulary, and
        DeadlineExceeded when time.monotonic() reaches `deadline_s`."""
        check_token_ids("token_ids", token_ids, self.vocab_size)
        ids = list(token_ids)
        short = len(ids) <= _INLINE_CHARACTERS
        return await self._run(short, deadline_s, lambda: str(self.backend.decode(ids, skip_special_tokens=False)))

    def token_piece(self, token_id: int) -> TokenPiece:
        """Return the text of one token, and its bytes if they differ from the text; both empty for an unknown id."""
        return self._token_texts.piece(token_id)

    def has_special(self, texts: Sequence[str]) -> bool:
        """Return True if one of the texts is a special token, which texts of answers leave out."""
        return any(self.backend.token_to_id(text) in self._skipped_ids for text in texts)

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, and of the word after a space if it begins with another token there and has
        as many, as vLLM does. Raises InvalidArgument for a word without tokens."""
        found: list[tuple[int, ...]] = []
        for word in words:
            bare, spaced = (
                self.backend.encode(space + word.lstrip(), add_special_tokens=False).ids for space in ("", " ")
            )
            if not bare or max(bare) >= self.vocab_size:
                raise InvalidArgument("params.bad_words", word, "texts of the model's own tokens")
            found.append(tuple(bare))
            if spaced[0] != bare[0] and len(spaced) == len(bare) and max(spaced) < self.vocab_size:
                found.append(tuple(spaced))
        return tuple(found)

    async def encode_chat(
        self, conversation: Conversation, max_tokens: int, deadline_s: float
    ) -> tuple[list[int], str]:
        """Encode a conversation, rendered with the chat template; return the tokens, and the end of the rendered text.
        Control tokens in messages, roles and tools become plain text. Raises as encode() and ChatTemplate.render()
        (missing text: InvalidArgument); also InvalidArgument for too many messages or parts, a long role, a variable
        that the template lacks, or a model without a template."""
        messages = conversation.turns
        if self.chat_template is None:
            value = f"{len(messages)} messages"
            raise InvalidArgument("prompt.messages", value, "used with a model that has a chat template")
        if len(messages) > max_tokens:
            raise InvalidArgument("prompt.messages", f"{len(messages)} messages", f"at most {max_tokens} messages")
        short = _is_short(messages) and not (conversation.tools or conversation.arguments)
        return await self._run(short, deadline_s, lambda: self._encode_chat(conversation, max_tokens, deadline_s))

    def _encode_chat(self, conversation: Conversation, max_tokens: int, deadline_s: float) -> tuple[list[int], str]:
        messages, template = conversation.turns, self.chat_template
        assert template is not None
        assert self._control is not None
        marks = _Marks(self._control)
        size_bytes = part_count = 0
        options = _options(conversation, template, marks)
        turns: list[RenderedTurn] = []
        for number, turn in enumerate(messages):
            _check_time(deadline_s)
            if len(turn.role) > MAX_ROLE_CHARACTERS:
                limit = f"at most {MAX_ROLE_CHARACTERS} characters"
                raise InvalidArgument(f"prompt.messages[{number}].role", turn.role, limit)
            part_count += len(turn.parts)
            if part_count > max_tokens:
                raise InvalidArgument("prompt.messages", f"{part_count} parts or more", f"at most {max_tokens} parts")
            texts = list(turn.parts) or [turn.content]
            size_bytes += sum(len(text.encode()) for text in texts)
            self._check_size("prompt.messages", size_bytes, max_tokens)
            fields = {}
            if turn.tool_calls or turn.tool_call_id or turn.name or turn.reasoning:
                fields = fields_of(turn, f"prompt.messages[{number}]", marks.mark)
            turns.append(RenderedTurn(marks.mark(turn.role), [marks.mark(text) for text in texts], fields))
        self._check_size("prompt.messages", marks.size_bytes, max_tokens)
        most_characters = max_tokens * self.longest_token_bytes * (_MARKED_CHARACTERS if marks.found else 1)
        try:
            text = template.render(turns, most_characters, deadline_s, options)
        except MissingText as error:
            turn, field = messages[error.number], f"prompt.messages[{error.number}].content"
            limit = f"text that the model's chat template writes for role {turn.role!r}: the rendered prompt lacks it"
            raise InvalidArgument(field, "\n".join(turn.parts) or turn.content, limit) from error
        _check_time(deadline_s)
        backend = self._control.backend if marks.found else self.backend
        # The template itself writes the special tokens.
        token_ids = self._ids("prompt.messages", text, max_tokens, backend, add_special_tokens=False)
        return token_ids, text[-_END_CHARACTERS:]

    def _ids(
        self, field: str, text: str, max_tokens: int, backend: Tokenizer, *, add_special_tokens: bool
    ) -> list[int]:
        """Encode a text. Raises InvalidArgument, naming `field`, for too many tokens or one that the model lacks."""
        # The batch call releases the GIL, encode() does not; the fast variant keeps nothing that is slow to free.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if len(encoding) > max_tokens:
            raise InvalidArgument("prompt", f"{len(encoding)} tokens", f"at most {max_tokens} tokens")
        token_ids = list(encoding.ids)
        if self.unknown_tokens and (largest := max(token_ids, default=0)) >= self.vocab_size:
            limit = f"text of the model's own tokens, whose ids are below {self.vocab_size}"
            raise InvalidArgument(field, f"text with the token {self.backend.id_to_token(largest)!r}, {largest}", limit)
        return token_ids

    def _check_size(self, field: str, size_bytes: int, max_tokens: int) -> None:
        limit_bytes = max_tokens * self.longest_token_bytes
        if size_bytes > limit_bytes:
            reason = f"{self.longest_token_bytes} for each of {max_tokens} tokens"
            raise InvalidArgument(field, f"{size_bytes} bytes", f"at most {limit_bytes} bytes, {reason}")

    async def _run(self, short: bool, deadline_s: float, encode: Callable[[], ResultT]) -> ResultT:
        if short:
            return encode()
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        except TimeoutError as error:
            raise DeadlineExceeded from error


class _Marks:
    """Marks the control tokens of a conversation's texts."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self.found = False
        """True if a text has control tokens."""
        self.size_bytes = 0
        """UTF-8 size of all marked texts."""

    def mark(self, text: str) -> str:
        marked, found = self._control.mark(text)
        self.found = self.found or found
        self.size_bytes += len(text.encode())
        return marked


def _options(conversation: Conversation, template: ChatTemplate, marks: _Marks) -> RenderOptions:
    """Return what the template gets beside the messages. Raises InvalidArgument for what it does not take."""
    arguments = dict(conversation.arguments)
    if arguments.get("reasoning_effort") == "none" and not template.has_variable("reasoning_effort"):
        # Other templates know reasoning that is on or off, or none.
        del arguments["reasoning_effort"]
        arguments |= {"enable_thinking": False} if template.has_variable("enable_thinking") else {}
    for name, value in arguments.items():
        if not template.has_variable(name):
            limit = "left out: the model's chat template has no such variable"
            raise InvalidArgument(f"prompt.template_arguments.{name}", value, limit)
    if conversation.tools and not template.has_variable("tools"):
        limit = "left out: the model's chat template takes none"
        raise InvalidArgument("prompt.tools", f"{len(conversation.tools)} tools", limit)
    return RenderOptions(
        marked_values(list(conversation.tools), marks.mark),
        marked_values(arguments, marks.mark),
        conversation.continues,
        conversation.begins_turn,
    )


def _is_short(messages: Sequence[Turn]) -> bool:
    if len(messages) > _INLINE_MESSAGES or sum(len(turn.parts) for turn in messages) > _INLINE_MESSAGES:
        return False
    if any(turn.tool_calls or turn.tool_call_id or turn.name or turn.reasoning for turn in messages):
        return False
    texts = [text for turn in messages for text in (turn.role, turn.content, *turn.parts)]
    return sum(map(len, texts)) <= _INLINE_CHARACTERS


def _check_time(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise DeadlineExceeded
