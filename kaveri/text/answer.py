"""One answer while it is generated: its tokens, their text, and the output not yet sent to the client. Unsent output is
merged into the next response, so the backlog never exceeds the answer itself."""

import asyncio
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kaveri.domain.sampling import FinishReason
from kaveri.text.detokenizer import Detokenizer

MAX_OUTPUT_BYTES = 2**18
"""Max bytes of one response, by a conservative estimate: far below the limit on messages, and read in milliseconds."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24
_CHARACTER_BYTES = 4
SLICE_TOKENS = 512
"""Tokens detokenized per turn of the event loop when an answer is resumed: ten milliseconds at most."""


class AnswerPart(NamedTuple):
    """Consecutive output of an answer for one response: tokens and text, or logprobs of the prompt."""

    first_index: int
    """Index in the answer of the first of token_ids."""
    token_ids: list[int]
    text: str
    logprobs: Sequence[Any]
    first_position: int = 0
    """Index in the prompt of the first of prompt_token_ids."""
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Any] = ()
    """One entry for each of prompt_token_ids; None for index 0, which nothing precedes."""
    first_character: int = 0
    """Offset of `text` in the answer, in characters."""
    text_offsets: Sequence[int] = ()
    """For each entry of logprobs, the offset in the answer of its token's text (or of the character it is part of)."""


@dataclass(eq=False, slots=True)
class _PromptReport:
    token_ids: Sequence[int]
    reported_count: int
    """Prompt positions whose logprobs were received. Position 0 has none and counts as received."""
    untaken: list[Any] = field(default_factory=list)
    """Entries not sent yet. The one of position 0, None, is added with the next entry."""


@dataclass(eq=False, slots=True)
class _Place:
    """Position in an answer, as its number of tokens and of characters before it."""

    tokens: int = 0
    characters: int = 0


class Answer:
    """Tokens, text and unsent output of one answer, whichever instances generate it. Each token is appended once."""

    def __init__(self, detokenizer: Detokenizer, reported_prompt: Sequence[int] = ()) -> None:
        """reported_prompt: the prompt's token ids if its logprobs are requested, else empty."""
        self._prompt = _PromptReport(reported_prompt, min(1, len(reported_prompt)))
        # An array, because garbage collection visits each item of a list, for all answers in one turn of the event
        # loop.
        self.token_ids: array[int] = array("I")
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._detokenizer = detokenizer
        self._taken = _Place()
        """End of the output returned by take(), or received by the client in an earlier session."""
        self._text: deque[tuple[int, str]] = deque()
        """Text pieces, each with the number of tokens after which its text was certain."""
        self._logprobs: list[tuple[Any, int]] = []
        """Logprobs of tokens not taken yet, each with the offset of the token's text."""
        self._skipped_characters = 0
        """Characters that a resuming client already has and the tokens so far have not produced."""
        self.withholds_last = False
        """True: take() does not return the last token before the answer has ended."""

    async def go_on_after(self, token_ids: Sequence[int], characters: int, stop_token_ids: Collection[int]) -> int:
        """Resume an answer whose client has these tokens and this many characters; take() does not return them again.
        Returns the number of those characters that the tokens' text, including text held back, lacks."""
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
        """True once the text has reached a stop text; append() then does nothing."""
        return self._detokenizer.stop_text is not None

    @property
    def stop_text(self) -> str | None:
        """Stop text that ended the answer; None if there is none."""
        return self._detokenizer.stop_text

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[Any], finish: FinishReason | None, now_s: float
    ) -> None:
        """Append tokens, up to one that completes a stop text. logprobs: one per token, or empty. finish: why the
        engine ends the answer with them; None: it goes on. now_s: monotonic clock."""
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
        """Append logprobs of prompt positions from `first` on; ignores positions already received."""
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
        """Release the text held back. Call after the last token."""
        self._add_text(self._detokenizer.flush())

    @property
    def has_output(self) -> bool:
        """True if take() has output."""
        ready = len(self.token_ids) - self.withholds_last
        has_text = bool(self._text) and self._text[0][0] <= ready
        return self._taken.tokens < ready or has_text or bool(self._prompt.untaken)

    def take(self) -> AnswerPart:
        """Return the next output and mark it as taken; only as much as fits into one response."""
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
