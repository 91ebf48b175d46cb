"""Turns text and conversations into token ids with the model's own tokenizer. Needs no torch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from kaveri.errors import ConfigError, InvalidArgument
from kaveri.models import resolve_model

_INLINE_CHARACTERS = 4_096
"""Shorter texts are tokenized on the event loop: about a millisecond, where a thread's hand-over costs as much."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class ModelTokenizer:
    """The tokenizer of one model. close() ends its threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.vocab_size = vocab_size
        """Size of the model's vocabulary, which may be padded beyond the tokenizer's."""
        self.has_chat_template = bool(tokenizer.chat_template)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, model: str) -> "ModelTokenizer":
        """Loads from a path, a hub id or a bundled name. Blocks for seconds. Raises ConfigError, naming --model."""
        source = resolve_model(model)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            config = AutoConfig.from_pretrained(source).get_text_config()
        except (OSError, ValueError, KeyError, ImportError) as error:
            # The first line says what is wrong; the rest is advice about hub tokens and caches.
            first_line = str(error).partition("\n")[0].rstrip(": ")
            raise ConfigError("--model", f"{model!r} has no tokenizer that can be loaded: {first_line}") from error
        if not tokenizer.is_fast:
            raise ConfigError("--model", f"{model!r} has no tokenizer.json (a fast tokenizer)")
        return cls(tokenizer, int(config.vocab_size))

    def close(self) -> None:
        """Ends the threads; texts in work are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the model's tokenizer adds by itself."""
        return await self._run(len(text), lambda: self._encode(text, add_special_tokens=True))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, rendered with the chat template up to where the assistant speaks.

        Raises InvalidArgument when the model has no template, or its template refuses the conversation.
        """
        if not self.has_chat_template:
            value = f"{len(messages)} messages"
            raise InvalidArgument("prompt.messages", value, "used with a model that has a chat template")
        return await self._run(sum(len(entry.content) for entry in messages), lambda: self._encode_chat(messages))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        turns = [{"role": entry.role, "content": entry.content} for entry in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidArgument(
                "prompt.messages", [entry.role for entry in messages], f"as the template wants: {error}"
            ) from error
        # The template writes the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    async def _run(self, characters: int, encode: Callable[[], list[int]]) -> list[int]:
        if characters <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
