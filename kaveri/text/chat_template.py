"""Renders conversations with a model's chat template, and checks that the prompt has the text of every message."""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2.sandbox import safe_range
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _compile_jinja_template

from kaveri.errors import DeadlineExceeded, InvalidArgument
from kaveri.text.content_format import ContentFormat

_MAX_RENDER_S = 10.0
"""Max rendering time: a slower template is in a loop; 131,072 messages take less than 2 s."""
_SAMPLE_RENDER_S = 2.0
_SAMPLED_ROLES = (("user",), ("user", "assistant", "user"), ("system", "user"))
_SAMPLE = "Kaveri sample"
_SAMPLE_KEY = "kaveri_sample_key"
"""Extra key in each content part of a sample. If the prompt has it, the template printed the list of parts as it is."""
_CLOSING_TAG = re.compile(r"</[^<>]*>|\[/[A-Z_]+\]|◁/think▷")
_SWITCH = re.compile(r"/(?:no_?)?think\b")


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """Message of a conversation, as passed to the chat template."""

    role: str
    texts: Sequence[str]
    """Content parts in order; a plain text is one part."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the message, such as tool_calls, as templates take them."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a chat template gets beside the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call, as OpenAI's."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    continues: bool = False
    """The prompt ends with the text of the last message."""
    begins_turn: bool = True
    """The prompt ends with the start of the assistant's turn, unless it continues."""


NO_OPTIONS = RenderOptions()


class MissingText(Exception):
    """The rendered prompt lacks the text of a message."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        """Index of the first such message."""


class ChatTemplate:
    """Chat template of one model. A rendered prompt must contain the text of every message; if not, it is rendered
    again with each message's parts joined. Of an assistant's message only the text after its last closing tag must be
    there, because templates omit earlier reasoning. The text may lack outer white space and the switches `/think` and
    `/no_think`, or be escaped as JSON. A text that occurs elsewhere in the prompt counts as present. The role
    "developer" is rendered as "system" unless the template's source has the word."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, content_format: ContentFormat = ContentFormat.AUTO) -> None:
        self._tokenizer = tokenizer
        self._special_tokens: Mapping[str, Any] = tokenizer.special_tokens_map
        self._has_developers = self.has_variable("developer")
        self.content_format = self._detect() if content_format is ContentFormat.AUTO else content_format
        """Format in which the template receives content; never AUTO."""
        self._formats = [self.content_format]
        if content_format is ContentFormat.AUTO and self.content_format is ContentFormat.OPENAI:
            # A template may iterate over the parts of some roles only.
            self._formats.append(ContentFormat.STRING)

    @property
    def source(self) -> str:
        """The template itself."""
        return str(self._tokenizer.get_chat_template())

    def has_variable(self, name: str) -> bool:
        """Return True if the template may read a variable of this name: its source has the word."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    def render(
        self,
        turns: Sequence[RenderedTurn],
        most_characters: int,
        deadline_s: float,
        options: RenderOptions = NO_OPTIONS,
    ) -> str:
        """Render the prompt, up to the start of the assistant's turn or as `options` say. Raises MissingText;
        InvalidArgument when the template rejects the conversation or fails, takes too long, or writes more than
        `most_characters`; DeadlineExceeded when time.monotonic() reaches `deadline_s`."""
        lacking, mark = None, ""
        if not self._has_developers:
            turns = [replace(turn, role="system") if turn.role == "developer" else turn for turn in turns]
        if options.continues:
            # Marks the end of the last message, after which the template may add text. Made of Unicode noncharacters,
            # which no text contains.
            mark = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(8))
            *others, last = turns
            turns = [*others, replace(last, texts=[*last.texts[:-1], last.texts[-1] + mark])]
        for content_format in self._formats:
            contents = [(turn.role, _contents(turn.texts, content_format)) for turn in turns]
            messages = _messages(contents, content_format)
            for message, turn in zip(messages, turns, strict=True):
                message.update(turn.fields)
            prompt = self._write(messages, most_characters, deadline_s, options)
            if options.continues:
                prompt = _cut_at(mark, prompt)
            # Templates leave out what an assistant said beside its calls.
            shown = [
                (role, () if "tool_calls" in turn.fields else [text.removesuffix(mark) for text in texts])
                for (role, texts), turn in zip(contents, turns, strict=True)
            ]
            missing = first_missing(shown, prompt, deadline_s)
            if missing is None:
                return prompt
            lacking = missing if lacking is None else lacking
        assert lacking is not None
        raise MissingText(lacking)

    def samples(self) -> list[str]:
        """Render short sample conversations with the usual roles. Omits those that the template rejects."""
        found = (self._sample(roles, self.content_format) for roles in _SAMPLED_ROLES)
        return [sample for sample in found if sample is not None]

    def _write(
        self,
        messages: list[dict[str, Any]],
        most_characters: int,
        deadline_s: float,
        options: RenderOptions = NO_OPTIONS,
    ) -> str:
        pieces: list[str] = []
        room = most_characters
        overdue_s = time.monotonic() + _MAX_RENDER_S
        roles = [message["role"] for message in messages[:8]]

        def check() -> None:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise DeadlineExceeded
            if now_s > overdue_s:
                limit = f"rendered by the model's chat template within {_MAX_RENDER_S:.0f} s"
                raise InvalidArgument("prompt.messages", roles, limit)

        try:
            for piece in self._pieces(messages, check, options):
                check()
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    limit = f"at most {most_characters}: more characters of the model's chat template never fit"
                    raise InvalidArgument("prompt.messages", roles, limit)
        except (DeadlineExceeded, InvalidArgument):
            raise
        except Exception as error:
            # Templates are programs supplied with models: they may raise anything, RecursionError for example.
            limit = f"as the model's chat template wants: {type(error).__name__}: {error!s:.200}"
            raise InvalidArgument("prompt.messages", roles, limit) from error
        return "".join(pieces)

    def _pieces(self, messages: list[dict[str, Any]], check: Callable[[], None], options: RenderOptions) -> Any:
        def checked_range(*arguments: int) -> range:
            # Checks the deadline in loops that write nothing.
            check()
            return safe_range(*arguments)

        # As apply_chat_template(), which gives no pieces. Compiled templates are cached there.
        template = _compile_jinja_template(self._tokenizer.get_chat_template())
        for name, value in options.arguments.items():
            if name == "self" or name in self._special_tokens or name in template.globals:
                limit = "left out: the chat template gets it from Kaveri or the tokenizer"
                raise InvalidArgument(f"prompt.template_arguments.{name}", value, limit)
        return template.generate(
            messages=messages,
            tools=list(options.tools) or None,
            documents=None,
            add_generation_prompt=options.begins_turn and not options.continues,
            range=checked_range,
            **self._special_tokens,
            **options.arguments,
        )

    def _detect(self) -> ContentFormat:
        """Detect the format: OPENAI if the template iterates over a message's parts, else STRING."""
        for roles in _SAMPLED_ROLES:
            for content_format in (ContentFormat.OPENAI, ContentFormat.STRING):
                sample = self._sample(roles, content_format)
                if sample is not None and sample.count(_SAMPLE) >= len(roles) and _SAMPLE_KEY not in sample:
                    return content_format
        return ContentFormat.STRING

    def _sample(self, roles: Sequence[str], content_format: ContentFormat) -> str | None:
        messages = _messages([(role, [_SAMPLE]) for role in roles], content_format)
        for message in messages:
            if content_format is ContentFormat.OPENAI:
                message["content"][0][_SAMPLE_KEY] = ""
        try:
            return self._write(messages, 2**20, time.monotonic() + _SAMPLE_RENDER_S)
        except (InvalidArgument, DeadlineExceeded):
            return None


def _contents(texts: Sequence[str], content_format: ContentFormat) -> Sequence[str]:
    return texts if content_format is ContentFormat.OPENAI else ["\n".join(texts)]


def _messages(contents: Sequence[tuple[str, Sequence[str]]], content_format: ContentFormat) -> list[dict[str, Any]]:
    if content_format is ContentFormat.OPENAI:
        return [
            {"role": role, "content": [{"type": "text", "text": text} for text in texts]} for role, texts in contents
        ]
    return [{"role": role, "content": texts[0]} for role, texts in contents]


def _cut_at(mark: str, prompt: str) -> str:
    """Return the prompt up to the mark. Raises InvalidArgument if the template has left it out."""
    before, found, _ = prompt.partition(mark)
    if not found:
        raise InvalidArgument("continue_final_message", True, "left out: the chat template omits the last message")
    return before


def first_missing(contents: Sequence[tuple[str, Sequence[str]]], prompt: str, deadline_s: float) -> int | None:
    """Return the index of the first message with a text missing from the prompt; None if there is none. contents:
    (role, texts) per message. Linear in the prompt's length if it keeps their order; system messages may move."""
    ends = {False: 0, True: 0}
    for number, (role, texts) in enumerate(contents):
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded
        is_system = role in ("system", "developer")
        for text in texts:
            if role == "assistant":
                text = text[max((found.end() for found in _CLOSING_TAG.finditer(text)), default=0) :]
            end = _end_of(text.strip(), prompt, ends[is_system])
            if end is None:
                return number
            ends[is_system] = end
    return None


def _end_of(text: str, prompt: str, start: int) -> int | None:
    """Return the end index of `text` in the prompt, searched from `start` and then from 0; None if missing."""
    end = _end_of_exactly(text, prompt, start)
    if end is None:
        end = _end_of_exactly(json.dumps(text, ensure_ascii=False)[1:-1], prompt, start)
    if end is None and _SWITCH.search(text):
        end = start
        for piece in _SWITCH.split(text):
            found = _end_of_exactly(piece.strip(), prompt, end)
            if found is None:
                return None
            end = found
    return end


def _end_of_exactly(text: str, prompt: str, start: int) -> int | None:
    found = prompt.find(text, start)
    if found < 0 < start:
        found = prompt.find(text)
    return None if found < 0 else found + len(text)
