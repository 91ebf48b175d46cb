"""One answer as it grows: its tokens, their text, and the output that its client has not taken yet. Output that the
client has not taken is coalesced into its next response, so the backlog is bounded by the answer's own length."""

import asyncio
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kaveri.domain.sampling import FinishReason
from kaveri.text.detokenizer import Detokenizer

MAX_OUTPUT_BYTES = 2**18
"""Max bytes of one response, by a conservative estimate. A reader processes that much in a few milliseconds, and it is
far below the message limit, so an underestimate is harmless."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24
_CHARACTER_BYTES = 4
SLICE_TOKENS = 512
"""Batch size when detokenizing tokens that the client already has; with models whose tokens are not plain ten, a
millisecond of the event loop each."""


class AnswerPart(NamedTuple):
    """A piece of an answer, small enough for one response."""

    first_index: int
    """Index of the first token."""
    token_ids: list[int]
    text: str
    logprobs: Sequence[Any]
    first_position: int = 0
    """Position of the first reported prompt token."""
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Any] = ()
    """One entry per reported prompt token; None for position 0."""
    first_character: int = 0
    """Offset of `text` in the answer, in characters."""
    text_offsets: Sequence[int] = ()
    """For each token with logprobs, the offset of its text (or of the character that it is part of) in the answer, in
    characters."""


@dataclass(eq=False, slots=True)
class _PromptReport:
    """Progress of a prompt's logprobs."""

    token_ids: Sequence[int]
    reported_count: int
    """Prompt positions whose logprobs have arrived. Position 0 never has any."""
    untaken: list[Any] = field(default_factory=list)
    """Entries not taken yet. Position 0 is added with the next entries: alone it is no output."""


@dataclass(eq=False, slots=True)
class _Place:
    """Length of an answer's part, in tokens and in characters of its text."""

    tokens: int = 0
    characters: int = 0


class Answer:
    """The answer over all attempts. Tokens are appended in order, each once."""

    def __init__(self, detokenizer: Detokenizer, reported_prompt: Sequence[int] = ()) -> None:
        """detokenizer: for the request's prompt and stop texts. reported_prompt: the prompt's tokens, if prompt
        logprobs are requested."""
        self._prompt = _PromptReport(reported_prompt, min(1, len(reported_prompt)))
        # An array, because garbage collection visits each item of a list, for all answers in one turn of the event
        # loop.
        self.token_ids: array[int] = array("I")
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._detokenizer = detokenizer
        self._taken = _Place()
        """Part of the answer that was taken, by earlier sessions too."""
        self._text: deque[tuple[int, str]] = deque()
        """Text pieces, each with the number of tokens received when it was decided."""
        self._logprobs: list[tuple[Any, int]] = []
        """Logprobs of tokens not taken yet, each with the offset of its text."""
        self._skipped_characters = 0
        """Characters that the client has, and the tokens so far have not brought."""
        self.withholds_last = False
        """True if take() holds the last token back until the end of the answer."""

    async def go_on_after(self, token_ids: Sequence[int], characters: int, stop_token_ids: Collection[int]) -> int:
        """Resume after the tokens and characters that the client received in earlier sessions; take() does not return
        them again. Returns how many characters the client claims beyond the text of its tokens, which includes text
        held back."""
        self._skipped_characters = self._taken.characters = characters
        for position, token_id in enumerate(token_ids):
            if position % SLICE_TOKENS == SLICE_TOKENS - 1:
                await asyncio.sleep(0)
            self.token_ids.append(token_id)
            # A stop token is always last and has no text.
            if not self.stopped and not (position + 1 == len(token_ids) and token_id in stop_token_ids):
                self._add_text(self._detokenizer.push(token_id))
        self._taken.tokens = len(self.token_ids)
        if not self._skipped_characters or self.stopped:
            return self._skipped_characters
        return max(0, self._skipped_characters - len(self._detokenizer.undecided))

    @property
    def stopped(self) -> bool:
        """True once the text has reached a stop text. Nothing is appended afterwards."""
        return self._detokenizer.stop_text is not None

    @property
    def stop_text(self) -> str | None:
        """The stop text that the text has reached, if any."""
        return self._detokenizer.stop_text

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[Any], finish: FinishReason | None, now_s: float
    ) -> None:
        """Append tokens, up to the one whose text completes a stop text. finish: set if they end the answer."""
        if self._detokenizer.stop_text is not None:
            return
        if len(self._prompt.token_ids) == 1 and token_ids and not self.token_ids:
            self._prompt.untaken.append(None)
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        # As in vLLM, the stop token is part of the answer's tokens and logprobs, but not of its text.
        text_count = len(token_ids) - (finish is FinishReason.STOP)
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if logprobs:
                self._logprobs.append((logprobs[position], self._detokenizer.decided_characters))
            if position < text_count:
                self._add_text(self._detokenizer.push(token_id))
                if self._detokenizer.stop_text is not None:
                    return

    def append_prompt(self, first: int, entries: Sequence[Any]) -> None:
        """Append logprobs of the prompt's positions from `first` on; skips positions already received."""
        prompt = self._prompt
        seen = prompt.reported_count - first
        if self.lacks_prompt and seen >= 0:
            new = entries[seen : seen + len(prompt.token_ids) - prompt.reported_count]
            if new and prompt.reported_count == 1:
                prompt.untaken.append(None)
            prompt.untaken += new
            prompt.reported_count += len(new)

    @property
    def lacks_prompt(self) -> bool:
        """True while logprobs of the prompt are still missing."""
        return self._prompt.reported_count < len(self._prompt.token_ids)

    def flush(self) -> None:
        """Release the text held back; no more tokens follow."""
        self._add_text(self._detokenizer.flush())

    @property
    def has_output(self) -> bool:
        """True if take() has output."""
        ready = len(self.token_ids) - self.withholds_last
        has_text = bool(self._text) and self._text[0][0] <= ready
        return self._taken.tokens < ready or has_text or bool(self._prompt.untaken)

    def take(self) -> AnswerPart:
        """Take the pending output, or its first part if it exceeds one response."""
        if self._prompt.untaken:
            return self._take_prompt()
        first, first_character = self._taken.tokens, self._taken.characters
        count = len(self.token_ids) - self.withholds_last - first
        room = MAX_OUTPUT_BYTES // 2
        if not self._logprobs:
            count = min(count, room // _TOKEN_BYTES)
        for position, (logprobs, _) in zip(range(count), self._logprobs, strict=False):
            room -= _TOKEN_BYTES + _LOGPROB_BYTES * (1 + len(logprobs.top))
            if room < 0:
                count = max(1, position)
                break
        self._taken.tokens += count
        token_ids = self.token_ids[first : self._taken.tokens].tolist()
        text = self._take_text()
        self._taken.characters += len(text)
        if not self._logprobs:
            return AnswerPart(first, token_ids, text, (), first_character=first_character)
        reports, text_offsets = zip(*self._logprobs[:count], strict=True) if count else ((), ())
        del self._logprobs[:count]
        return AnswerPart(first, token_ids, text, reports, first_character=first_character, text_offsets=text_offsets)

    def _take_prompt(self) -> AnswerPart:
        """Take part of the prompt's logprobs. The first token comes after all of them."""
        prompt = self._prompt
        first = prompt.reported_count - len(prompt.untaken)
        room, count = MAX_OUTPUT_BYTES // 2, 0
        for entry in prompt.untaken:
            room -= _TOKEN_BYTES + _LOGPROB_BYTES * (1 if entry is None else 1 + len(entry.top))
            if room < 0:
                break
            count += 1
        entries = prompt.untaken[: max(1, count)]
        del prompt.untaken[: len(entries)]
        token_ids = prompt.token_ids[first : first + len(entries)]
        return AnswerPart(self._taken.tokens, [], "", (), first, token_ids, entries)

    def _take_text(self) -> str:
        """Take the text of the taken tokens, as far as it fits into a response."""
        pieces: list[str] = []
        room = MAX_OUTPUT_BYTES // 2 // _CHARACTER_BYTES
        while room > 0 and self._text and self._text[0][0] <= self._taken.tokens:
            count, piece = self._text.popleft()
            if len(piece) > room:
                self._text.appendleft((count, piece[room:]))
                piece = piece[:room]
            pieces.append(piece)
            room -= len(piece)
        return "".join(pieces)

    def _add_text(self, piece: str) -> None:
        if self._skipped_characters:
            skipped = min(self._skipped_characters, len(piece))
            self._skipped_characters -= skipped
            piece = piece[skipped:]
        if piece:
            self._text.append((len(self.token_ids), piece))
