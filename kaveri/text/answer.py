"""One answer as it grows: its tokens, their text, and what its client has not taken yet.

Tokens that the client has not taken yet are joined in its next response, so what waits is bounded by the answer's own
length.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kaveri.domain.sampling import FinishReason
from kaveri.text.detokenizer import Detokenizer

MAX_OUTPUT_BYTES = 2**18
"""Of one response, by an estimate from above: what a reader makes of it at once takes some milliseconds, and it is far
below the largest message, so a wrong estimate does no harm."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24
_CHARACTER_BYTES = 4
SLICE_TOKENS = 512
"""Tokens that the client has are detokenized in slices, a millisecond of the event loop each, with models whose tokens
are not plain ten."""


class AnswerPart(NamedTuple):
    """A piece of an answer, small enough for one response."""

    first_index: int
    """Index of the first token."""
    token_ids: list[int]
    text: str
    logprobs: Sequence[Any]
    first_position: int = 0
    """Of the first of the prompt's tokens that are reported on."""
    prompt_token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Any] = ()
    """One for each of them; None of position 0."""
    first_character: int = 0
    """Characters of the answer before the text."""
    text_offsets: Sequence[int] = ()
    """Of each token with logprobs: where its text begins, or its character's, in characters of the answer."""


class Answer:
    """The answer over all attempts. Tokens are appended in order, each once."""

    def __init__(self, detokenizer: Detokenizer, reported_prompt: Sequence[int] = ()) -> None:
        """detokenizer: of the request's prompt and stop texts. reported_prompt: the prompt's tokens, when a report on
        them is wanted."""
        self._prompt = reported_prompt
        self._reported_count = min(1, len(reported_prompt))
        """Positions of the prompt whose report has come. Of position 0 there is nothing to say."""
        self._prompt_logprobs: list[Any] = []
        """Of those that were not taken. Position 0 enters with what comes next: alone it is no output."""
        # Garbage collection goes over each item of a list, of all answers in one turn of the event loop.
        self.token_ids: array[int] = array("I")
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._detokenizer = detokenizer
        self._taken_count = 0
        self._text: deque[tuple[int, str]] = deque()
        """Pieces with the number of tokens that had come when each was decided."""
        self._logprobs: list[Any] = []
        self._text_offsets: list[int] = []
        """One for each of them."""
        self._skipped_characters = 0
        self._taken_characters = 0
        self.withholds_last = False
        """Whether take() keeps the last token back. It then comes with the end of the answer."""

    async def go_on_after(self, token_ids: Sequence[int], characters: int, stop_token_ids: Collection[int]) -> None:
        """Begins behind what the client has of earlier sessions: take() gives no more of it."""
        self._skipped_characters = self._taken_characters = characters
        for position, token_id in enumerate(token_ids):
            if position % SLICE_TOKENS == SLICE_TOKENS - 1:
                await asyncio.sleep(0)
            self.token_ids.append(token_id)
            # A stop token is the last one, and has no text.
            if not self.stopped and not (position + 1 == len(token_ids) and token_id in stop_token_ids):
                self._add_text(self._detokenizer.push(token_id))
        self._taken_count = len(self.token_ids)

    @property
    def unreceived_characters(self) -> int:
        """How many characters that the client has are not decided here yet."""
        return self._skipped_characters

    @property
    def missing_characters(self) -> int:
        """Characters that the client claims to have and that its tokens do not hold, text held back included."""
        undecided = "" if self.stopped else self._detokenizer.undecided
        return max(0, self._skipped_characters - len(undecided))

    @property
    def stopped(self) -> bool:
        """Whether the text has met a stop text. Nothing is appended any more."""
        return self._detokenizer.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop text that the text has met."""
        return self._detokenizer.stop_text

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[Any], finish: FinishReason | None, now_s: float
    ) -> None:
        """Takes the next tokens, up to the one whose text completes a stop text. finish: they end the answer."""
        if self._detokenizer.stopped:
            return
        if len(self._prompt) == 1 and token_ids and not self.token_ids:
            self._prompt_logprobs.append(None)
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        # The stop token is part of the answer's tokens and logprobs, not of its text, like with vLLM.
        text_count = len(token_ids) - (finish is FinishReason.STOP)
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if logprobs:
                self._logprobs.append(logprobs[position])
                self._text_offsets.append(self._detokenizer.decided_characters)
            if position < text_count:
                self._add_text(self._detokenizer.push(token_id))
                if self._detokenizer.stopped:
                    return

    def append_prompt(self, first: int, entries: Sequence[Any]) -> None:
        """Takes what is said of the prompt's positions from `first` on; drops those that it has already."""
        seen = self._reported_count - first
        if self.lacks_prompt and seen >= 0:
            new = entries[seen : seen + len(self._prompt) - self._reported_count]
            if new and self._reported_count == 1:
                self._prompt_logprobs.append(None)
            self._prompt_logprobs += new
            self._reported_count += len(new)

    @property
    def lacks_prompt(self) -> bool:
        """Whether a part of the report on the prompt is still to come."""
        return self._reported_count < len(self._prompt)

    def flush(self) -> None:
        """Releases the text that is held back: no more tokens come."""
        self._add_text(self._detokenizer.flush())

    @property
    def has_output(self) -> bool:
        """Whether take() has something."""
        ready = len(self.token_ids) - self.withholds_last
        return self._taken_count < ready or self._has_text(ready) or bool(self._prompt_logprobs)

    def take(self) -> AnswerPart:
        """What was not taken yet; the first part of it when that would be too large for a response."""
        if self._prompt_logprobs:
            return self._take_prompt()
        index = self._taken_count
        count = self._fitting_count()
        self._taken_count += count
        token_ids = self.token_ids[index : self._taken_count].tolist()
        first_character, text = self._taken_characters, self._take_text()
        self._taken_characters += len(text)
        if not self._logprobs:
            return AnswerPart(index, token_ids, text, (), first_character=first_character)
        part = AnswerPart(
            index,
            token_ids,
            text,
            self._logprobs[:count],
            first_character=first_character,
            text_offsets=self._text_offsets[:count],
        )
        del self._logprobs[:count], self._text_offsets[:count]
        return part

    def _take_prompt(self) -> AnswerPart:
        """A part of the report on the prompt. The first token comes behind all of it."""
        first = self._reported_count - len(self._prompt_logprobs)
        room, count = MAX_OUTPUT_BYTES // 2, 0
        for entry in self._prompt_logprobs:
            room -= _TOKEN_BYTES + _LOGPROB_BYTES * (1 if entry is None else 1 + len(entry.top))
            if room < 0:
                break
            count += 1
        entries = self._prompt_logprobs[: max(1, count)]
        del self._prompt_logprobs[: len(entries)]
        return AnswerPart(self._taken_count, [], "", (), first, self._prompt[first : first + len(entries)], entries)

    def _fitting_count(self) -> int:
        """How many of the tokens that were not taken fit into a response, with their logprobs."""
        untaken = len(self.token_ids) - self.withholds_last - self._taken_count
        room = MAX_OUTPUT_BYTES // 2
        if not self._logprobs:
            return min(untaken, room // _TOKEN_BYTES)
        for position, logprobs in zip(range(untaken), self._logprobs, strict=False):
            room -= _TOKEN_BYTES + _LOGPROB_BYTES * (1 + len(logprobs.top))
            if room < 0:
                return max(1, position)
        return untaken

    def _has_text(self, token_count: int) -> bool:
        return bool(self._text) and self._text[0][0] <= token_count

    def _take_text(self) -> str:
        """The text of the tokens that were taken, as far as it fits into a response."""
        pieces: list[str] = []
        room = MAX_OUTPUT_BYTES // 2 // _CHARACTER_BYTES
        while room > 0 and self._has_text(self._taken_count):
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
