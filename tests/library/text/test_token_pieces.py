import random
from collections.abc import Sequence
from functools import cache

import pytest
from tokenizers import Tokenizer

from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.text.answer import Answer
from kaveri.text.detokenizer import Detokenizer
from kaveri.text.token_texts import TokenTexts
from services.gateway.shown_prompts import PromptOffsets
from tests.support.tiny_tokenizers import BACKENDS

BYTES = [name for name in BACKENDS if name not in ("unigram", "word piece")]
"""Tokenizer families with a token for every byte."""
WORDS = ["hello", " there", " a", " b", "ab", "\n", "  ", "     ", "你好", "🙂", "é", " naïve", "x<3", " 😀", "\n\n\n"]
PLAIN_WORDS = ["hello", " there", " fox", " jumps", " dog", "the", " lazy", " abba", " quick", " France"]


@cache
def backend_of(family: str) -> Tokenizer:
    return BACKENDS[family]()


@pytest.fixture(params=list(BACKENDS))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def special_ids(backend: Tokenizer) -> list[int]:
    return [number for number, token in sorted(backend.get_added_tokens_decoder().items()) if token.special]


def drawn(family: str, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return a random prompt and answer of ordinary text, split between two characters."""
    backend = backend_of(family)
    words = WORDS if family in BYTES else PLAIN_WORDS
    text = "a" + "".join(rng.choice(words) for _ in range(rng.randrange(2, 30)))
    ids = backend.encode(text, add_special_tokens=False).ids
    cuts = [cut for cut in range(1, len(ids)) if not backend.decode(ids[:cut]).endswith("\ufffd")]
    cut = rng.choice(cuts or [1])
    return ids[:cut], ids[cut:]


def token_bytes(texts: TokenTexts, token_id: int) -> bytes:
    piece = texts.piece(token_id)
    return piece.raw_bytes or piece.text.encode()


def answered(
    backend: Tokenizer, prompt: Sequence[int], ids: Sequence[int], rng: random.Random, stop: Sequence[str] = ()
) -> tuple[str, list[int]]:
    """Return the text and token offsets of an answer that is appended and taken in random pieces."""
    answer = Answer(Detokenizer(backend, stop, prompt_token_ids=prompt, skipped_ids=frozenset(special_ids(backend))))
    text, offsets, place = "", [], 0
    while place < len(ids):
        count = rng.randrange(1, 5)
        some = ids[place : place + count]
        place += len(some)
        finish = FinishReason.LENGTH if place == len(ids) else None
        answer.append(some, [Logprobs(-1.0, ())] * len(some), finish, 0.0)
        if finish is not None:
            answer.flush()
        while (rng.random() < 0.5 or finish is not None) and answer.has_output:
            part = answer.take()
            assert len(part.text_offsets) == len(part.token_ids)
            text += part.text
            offsets += part.text_offsets
    return text, offsets


@pytest.mark.parametrize("seed", range(60))
def test_the_bytes_of_tokens_together_are_the_text(family: str, seed: int) -> None:
    rng, backend = random.Random(seed), backend_of(family)
    prompt, ids = drawn(family, rng)
    texts = TokenTexts(backend)
    text, _ = answered(backend, prompt, ids, rng)
    assert b"".join(token_bytes(texts, token_id) for token_id in ids) == text.encode(), seed


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("stop", [(), ("hello there a", "zzz", " a\n\n\nb")])
def test_a_tokens_text_stands_at_its_offset(family: str, seed: int, stop: tuple[str, ...]) -> None:
    rng, backend = random.Random(seed), backend_of(family)
    prompt, ordinary = drawn(family, rng)
    special = special_ids(backend)
    ids = [token_id for each in ordinary for token_id in (*rng.choices(special, k=rng.randrange(3)), each)]
    texts = TokenTexts(backend)
    whole, _ = answered(backend, prompt, ids, rng)
    text, offsets = answered(backend, prompt, ids, rng, stop)
    assert whole.startswith(text)
    before = b""
    for token_id, offset in zip(ids, offsets, strict=False):
        if token_id in special:
            assert offset == len(before.decode(errors="ignore")), seed
            continue
        piece = texts.piece(token_id)
        if "\ufffd" not in piece.text:
            assert whole[offset:].startswith(piece.text), (seed, offset, piece)
        # Where a token begins within a character, the offset is that character's.
        assert offset == len(before.decode(errors="ignore")), (seed, offset)
        before += token_bytes(texts, token_id)


@pytest.mark.parametrize("seed", range(20))
async def test_an_answer_that_goes_on_at_another_router_goes_on_with_its_offsets(family: str, seed: int) -> None:
    rng, backend = random.Random(seed), backend_of(family)
    prompt, ids = drawn(family, rng)
    skipped = frozenset(special_ids(backend))
    _, expected = answered(backend, prompt, ids, rng)
    count = rng.randrange(len(ids) + 1)
    answer = Answer(Detokenizer(backend, prompt_token_ids=prompt, skipped_ids=skipped))
    await answer.go_on_after(ids[:count], 0, ())
    answer.append(ids[count:], [Logprobs(-1.0, ())] * len(ids), FinishReason.LENGTH, 0.0)
    assert list(answer.take().text_offsets) == expected[count:], (seed, count)


@pytest.mark.parametrize("seed", range(60))
def test_offsets_within_a_shown_prompt_are_those_of_its_tokens(family: str, seed: int) -> None:
    rng, backend = random.Random(seed), backend_of(family)
    first, rest = drawn(family, rng)
    ids = [*first, *rest]
    text = str(backend.decode(ids))
    texts, found = TokenTexts(backend), PromptOffsets(text)
    # One that the tokenizer adds, and that the text lacks.
    assert found.next(backend.id_to_token(special_ids(backend)[0]), b"") == 0
    before = b""
    for token_id in ids:
        piece = texts.piece(token_id)
        offset = found.next(*piece)
        token = token_bytes(texts, token_id)
        if not before and not text.startswith(" "):
            # The space before the first word, which decoding leaves out.
            token = token.removeprefix(b" ")
        assert offset == len(before.decode(errors="ignore")), (seed, offset)
        before += token
    assert before == text.encode()


def test_a_prompt_that_the_tokenizer_changes_is_found_again_behind_the_change() -> None:
    found = PromptOffsets("HELLO there, naïve fox")
    tokens = ["<s>", "hello", " there", ",", " na", "ï", "ve", " fox", "</s>"]
    assert [found.next(text, b"") for text in tokens] == [0, 0, 5, 11, 12, 15, 16, 18, 22]


@pytest.mark.parametrize("family", BYTES)
def test_every_byte_has_a_token_with_that_byte(family: str) -> None:
    backend = backend_of(family)
    texts = TokenTexts(backend)
    vocabulary = backend.get_vocab()
    found = {token_bytes(texts, token_id) for token_id in vocabulary.values()}
    assert {bytes([byte]) for byte in range(256)} <= found


@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma"])
def test_a_token_of_several_spaces_keeps_them(family: str) -> None:
    backend = backend_of(family)
    texts = TokenTexts(backend)
    for token, token_id in backend.get_vocab().items():
        if token.strip("▁") == "" and token:
            assert texts.piece(token_id).text == " " * len(token)


def test_special_tokens_are_named_by_their_text_alone(family: str) -> None:
    backend = backend_of(family)
    texts = TokenTexts(backend)
    for token_id in special_ids(backend):
        assert texts.piece(token_id) == (backend.id_to_token(token_id), b"")
    assert texts.piece(1_999) == ("", b"")
