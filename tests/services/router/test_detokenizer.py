"""Incremental text equals the whole; stop texts are found wherever token boundaries fall."""

import random

import pytest

from services.router.detokenizer import Detokenizer
from services.router.tokenizer import ModelTokenizer


def run(tokenizer: ModelTokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, bool]:
    detokenizer = Detokenizer(tokenizer.backend, stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.flush())
    return "".join(pieces), detokenizer.stopped


@pytest.mark.parametrize("seed", range(40))
def test_pieces_joined_are_the_whole_text_for_random_tokens(tokenizer: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Byte tokens alone make broken UTF-8, at the end too; the whole vocabulary brings special tokens.
    highest = rng.choice([260, tokenizer.vocab_size])
    token_ids = [rng.randrange(highest) for _ in range(rng.randrange(1, 60))]
    assert run(tokenizer, token_ids)[0] == tokenizer.backend.decode(token_ids, skip_special_tokens=True), seed


def test_a_character_split_over_tokens_comes_out_whole(tokenizer: ModelTokenizer) -> None:
    text = "naïve 你好 🙂 end"
    detokenizer = Detokenizer(tokenizer.backend)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.backend.encode(text, add_special_tokens=False).ids]
    assert "".join(pieces) == text
    assert "" in pieces, "the smiley takes several tokens here, so some of them complete nothing"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(100))
def test_the_text_is_cut_before_the_first_stop_text(tokenizer: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("abc 你") for _ in range(rng.randrange(1, 40)))
    stop = tuple("".join(rng.choice("abc 你") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4)))
    # The match that ends first, the longer one of two that end together: whatever the tokens are.
    ends = [(text.find(entry) + len(entry), text.find(entry)) for entry in stop if entry in text]
    expected = text[: min(ends)[1]] if ends else text
    token_ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert run(tokenizer, token_ids, stop) == (expected, bool(ends)), seed


def test_a_possible_beginning_of_a_stop_text_is_held_back_until_it_is_decided(tokenizer: ModelTokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.backend, ("abcd",))
    pieces = [detokenizer.push(tokenizer.backend.encode(letter, add_special_tokens=False).ids[0]) for letter in "xabcz"]
    assert pieces == ["x", "", "", "", "abcz"]
