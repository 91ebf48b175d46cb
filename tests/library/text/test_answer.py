from typing import Any

import pytest

from kaveri.text import answer
from kaveri.text.answer import Answer


class Spelled:
    """Detokenizer whose tokens have the given texts."""

    stop_text = None
    decided_characters = 0

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        return self._texts[token_id]


@pytest.mark.parametrize("texts", [("a",) * 20, ("a", "b" * 50, "c"), ("", "", "abc")])
def test_text_comes_in_bounded_pieces_and_never_before_its_tokens(
    monkeypatch: pytest.MonkeyPatch, texts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(answer, "MAX_OUTPUT_BYTES", 40)
    spelled: Any = Spelled(*texts)
    taken = Answer(spelled)
    taken.append(range(len(texts)), (), None, 0.0)
    token_count, text = 0, ""
    while taken.has_output:
        part = taken.take()
        token_count += len(part.token_ids)
        text += part.text
        assert len(part.text.encode()) + 4 * len(part.token_ids) <= 40
        assert "".join(texts[:token_count]).startswith(text)
    assert (token_count, text) == (len(texts), "".join(texts))
