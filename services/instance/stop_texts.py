"""Ends an answer at the token whose text completes a stop text."""

from kaveri.domain.sampling import FinishReason
from kaveri.text.detokenizer import Detokenizer
from services.instance.decode_leg import DrawnTokens


class StopTexts:
    """Of one answer."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        """detokenizer: of the prompt and its stop texts."""
        self._detokenizer = detokenizer

    @property
    def stop_text(self) -> str | None:
        """The one that was met."""
        return self._detokenizer.stop_text

    def cut(self, drawn: DrawnTokens) -> DrawnTokens:
        """The tokens up to the one that completes a stop text, which ends the answer; all of them when none does."""
        # A stop token has no text.
        text_count = len(drawn.token_ids) - (drawn.finish is FinishReason.STOP)
        for position in range(text_count):
            self._detokenizer.push(drawn.token_ids[position])
            if self._detokenizer.stopped:
                count = position + 1
                return DrawnTokens(drawn.token_ids[:count], drawn.logprobs[:count], FinishReason.STOP)
        return drawn
