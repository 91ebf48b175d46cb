import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from kaveri.text.detokenizer import Detokenizer
from kaveri.text.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizers import FAMILIES


def read(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    """Return the text of these tokens, up to the first stop text."""
    text = ""
    for token_id in token_ids:
        text += detokenizer.push(token_id)
        if detokenizer.stop_text is not None:
            break
    return text + detokenizer.flush()


@pytest.mark.parametrize("seed", range(40))
def test_pieces_joined_are_the_whole_text_for_random_tokens(tokenizer: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Byte tokens alone make broken UTF-8, at the end too; the whole vocabulary brings special tokens.
    highest = rng.choice([260, tokenizer.vocab_size])
    token_ids = [rng.randrange(highest) for _ in range(rng.randrange(1, 60))]
    special = [number for number, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special]
    assert read(Detokenizer(tokenizer.backend, skipped_ids=special), token_ids) == decoded(tokenizer, token_ids), seed


@pytest.mark.parametrize("seed", range(100))
def test_the_text_of_plain_tokens_is_that_of_decoding_all(tokenizer: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Plain tokens between the bytes of characters, whole and broken ones, and special tokens.
    letters = tokenizer.backend.encode("a bc!", add_special_tokens=False).ids
    bits = tokenizer.backend.encode("é你🙂", add_special_tokens=False).ids
    whole = rng.random() < 0.5
    token_ids: list[int] = []
    for _ in range(rng.randrange(1, 20)):
        some = rng.choice([letters, bits, [rng.randrange(tokenizer.vocab_size)]])
        token_ids += some if whole else rng.sample(some, rng.randrange(len(some) + 1))
    count = rng.randrange(len(token_ids) + 1)
    prompt, answer = token_ids[:count], token_ids[count:]
    slow = Detokenizer(
        tokenizer.backend, prompt_token_ids=prompt, skipped_ids=frozenset(tokenizer.backend.get_added_tokens_decoder())
    )
    fast = tokenizer.detokenizer(prompt, ())
    assert [fast.push(token_id) for token_id in answer] == [slow.push(token_id) for token_id in answer], seed
    assert fast.flush() == slow.flush(), seed


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
    detokenizer = Detokenizer(tokenizer.backend, stop)
    assert (read(detokenizer, token_ids), detokenizer.stop_text is not None) == (expected, bool(ends)), seed


def test_a_possible_beginning_of_a_stop_text_is_held_back_until_it_is_decided(tokenizer: ModelTokenizer) -> None:
    detokenizer = Detokenizer(tokenizer.backend, ("abcd",))
    pieces = [detokenizer.push(tokenizer.backend.encode(letter, add_special_tokens=False).ids[0]) for letter in "xabcz"]
    assert pieces == ["x", "", "", "", "abcz"]


@pytest.fixture(scope="module", params=["llama2", "mistral", "gemma", "chatml"])
def family(request: pytest.FixtureRequest) -> Iterator[ModelTokenizer]:
    tokenizer = ModelTokenizer(FAMILIES[request.param](), 2000)
    yield tokenizer
    tokenizer.close()


def joined(tokenizer: ModelTokenizer, prompt: list[int], answer: list[int], stop: tuple[str, ...] = ()) -> str:
    return read(tokenizer.detokenizer(prompt, stop), answer)


def decoded(tokenizer: ModelTokenizer, token_ids: list[int]) -> str:
    return tokenizer.backend.decode(token_ids, skip_special_tokens=True)


WORDS = ["hello", " there", " a", " b", "ab", "\n", "  ", "你好", "🙂", "é", " naïve", "x<3", " 😀", "\n\n\n"]


@pytest.mark.parametrize("seed", range(60))
def test_the_text_is_what_the_answer_adds_to_the_prompts(family: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 40)))
    token_ids = family.backend.encode(text).ids
    # Cut anywhere that is no place within a character.
    cuts = [cut for cut in range(len(token_ids)) if not decoded(family, token_ids[:cut]).endswith("\ufffd")]
    cut = rng.choice(cuts)
    prompt, answer = token_ids[:cut], token_ids[cut:]
    whole = decoded(family, token_ids)
    assert decoded(family, prompt) + joined(family, prompt, answer) == whole, (seed, cut)


def test_the_space_between_prompt_and_answer_is_kept(llama2: ModelTokenizer) -> None:
    prompt = llama2.backend.encode("a b").ids
    answer = llama2.backend.encode("a b ab").ids[len(prompt) :]
    assert joined(llama2, prompt, answer) == " ab"
    assert joined(llama2, prompt, answer, ("b",)) == " a"


@pytest.mark.parametrize("seed", range(30))
def test_an_answer_to_a_prompt_that_ends_within_a_character_is_decoded_as_it_is(
    family: ModelTokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    character = family.backend.encode("a🙂", add_special_tokens=False).ids
    tail = rng.randrange(1, 4)
    answer = family.backend.encode("b " + rng.choice(WORDS), add_special_tokens=False).ids
    text = joined(family, character[:-tail], character[-tail:] + answer)
    assert text == decoded(family, character[-tail:] + answer), seed


def test_no_text_of_the_prompt_is_in_the_answer(family: ModelTokenizer) -> None:
    byte_tokens = [family.backend.encode(letter, add_special_tokens=False).ids[-1] for letter in "\u4f60"]
    character = family.backend.encode("你", add_special_tokens=False).ids
    for prompt in (character[:-2], [*character * 5, *character[:-1]], byte_tokens, character[1:2] * 50):
        text = joined(family, prompt, family.backend.encode(" hello", add_special_tokens=False).ids)
        assert text.replace("\ufffd", "").strip() == "hello", prompt
        assert text.count("\ufffd") <= 2, "characters of the prompt that the answer does not complete"


@pytest.fixture(scope="module")
def llama2() -> Iterator[ModelTokenizer]:
    tokenizer = ModelTokenizer(FAMILIES["llama2"](), 2000)
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("seed", range(200))
def test_no_answer_of_a_byte_fallback_tokenizer_breaks_the_text(llama2: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Complete, unfinished and invalid bytes, and text between them.
    names = ["<0x41>", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "▁hello", "a"]
    ids = {name: llama2.backend.token_to_id(name) for name in names}
    assert None not in ids.values()
    token_ids = [ids[rng.choice(names)] for _ in range(rng.randrange(1, 40))]
    text, expected = joined(llama2, [], token_ids), decoded(llama2, token_ids)
    # Only a run of bytes with an invalid one may decode differently; the text around it is complete.
    assert re.split("[^ helo]+", text) == re.split("[^ helo]+", expected), seed


def test_a_character_that_later_bytes_would_undo_stays_and_the_text_goes_on(llama2: ModelTokenizer) -> None:
    backend = llama2.backend
    token_ids = [backend.token_to_id(name) for name in ("<0x41>", "<0xFF>", "a", "▁a", "<0xE4>", "<0xBD>", "<0xA0>")]
    detokenizer = llama2.detokenizer([], ())
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert pieces == ["A", "", "\ufffda", " a", "", "", "你"]
    assert detokenizer.flush() == ""


class Counting:
    """Tokenizer that counts the tokens it decodes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.most_at_once = 0
        self.decoded_count = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.most_at_once = max(self.most_at_once, len(token_ids))
        self.decoded_count += len(token_ids)
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


@pytest.mark.parametrize("text", ["eos", "unknown id", "broken byte", "unfinished byte", "space", "word"])
def test_the_work_per_token_is_bounded_whatever_is_repeated(family: ModelTokenizer, text: str) -> None:
    backend = family.backend
    added = backend.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    bytes_of = {"broken byte": ("<0xFF>", "ÿ"), "unfinished byte": ("<0xE4>", "ä"), "space": ("▁", "Ġ")}
    token_id = {"eos": max(special), "unknown id": 1_999, "word": backend.encode("hello").ids[-1]}.get(text)
    if token_id is None:
        token_id = next(number for name in bytes_of[text] if (number := backend.token_to_id(name)) is not None)
    counting = Counting(backend)
    untyped: Any = counting
    detokenizer = Detokenizer(untyped, ("stop",), skipped_ids=special)
    pieces = [detokenizer.push(token_id) for _ in range(2_000)] + [detokenizer.flush()]
    assert "".join(pieces) == decoded(family, [token_id] * 2_000)
    assert counting.most_at_once <= 20
    assert counting.decoded_count <= 2_000 * 40
    if text in ("eos", "unknown id"):
        assert counting.decoded_count <= 100, "what has no text is not decoded"


def test_an_unfinished_character_is_held_back_and_then_let_go(family: ModelTokenizer) -> None:
    backend = family.backend
    broken = next(number for name in ("<0xFF>", "ÿ") if (number := backend.token_to_id(name)) is not None)
    detokenizer = family.detokenizer([], ())
    pieces = [detokenizer.push(broken) for _ in range(100)]
    assert len("".join(pieces)) >= 90


def test_text_between_broken_bytes_and_skipped_tokens_is_whole(family: ModelTokenizer) -> None:
    backend = family.backend
    special = max(number for number, token in backend.get_added_tokens_decoder().items() if token.special)
    hello = backend.encode("a hello there", add_special_tokens=False).ids
    token_ids = [token_id for word in hello for token_id in (word, *[special] * 30)]
    assert joined(family, [], token_ids) == decoded(family, hello)
    assert joined(family, hello, token_ids) == decoded(family, hello + hello)[len(decoded(family, hello)) :]


@pytest.mark.parametrize("seed", range(100))
def test_a_stop_text_that_is_complete_with_the_first_tokens_is_ignored(tokenizer: ModelTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    words = ["ab", "a", "b", " ", "é", "你", "xa"]
    text = "".join(rng.choice(words) for _ in range(rng.randrange(1, 30)))
    token_ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    stop = tuple(rng.sample(["ab", "ba", "xaab", "b a", "é", "aa", "a你a"], 3))
    min_tokens = rng.randrange(len(token_ids) + 2)
    stopping, plain = Detokenizer(tokenizer.backend, stop, min_tokens=min_tokens), Detokenizer(tokenizer.backend)
    given, decided, expected = "", "", None
    pieces = [*(("push", token_id) for token_id in token_ids), ("flush", 0)]
    for count, (call, token_id) in enumerate(pieces, start=1):
        given += stopping.push(token_id) if call == "push" else stopping.flush()
        before = len(decided)
        decided += plain.push(token_id) if call == "push" else plain.flush()
        # A match must end in what this token has decided.
        found = [
            (start + len(each), start)
            for each in stop
            for start in range(before + 1 - len(each), len(decided))
            if start >= 0 and start + len(each) > before and decided.startswith(each, start)
        ]
        if found and min(count, len(token_ids)) > min_tokens:
            expected = decided[: min(found)[1]]
            break
        assert decided.startswith(given), seed
    assert (stopping.stop_text is not None) == (expected is not None), seed
    assert given == (decided if expected is None else expected), seed


@pytest.mark.parametrize("min_tokens", [0, 2, 3, 50])
def test_a_special_token_that_is_a_stop_text_ends_the_answer_where_it_stands(
    family: ModelTokenizer, min_tokens: int
) -> None:
    added = family.backend.get_added_tokens_decoder()
    special, other = [number for number, token in sorted(added.items()) if token.special][-2:]
    stop = added[special].content
    hello = family.backend.encode("hello there", add_special_tokens=False).ids
    # "there!" may begin with the last word, which is held back until then.
    detokenizer = family.detokenizer([], ("never", stop, "there!"), min_tokens)
    answer, count = [*hello, other, special, *hello, special], 0
    text = ""
    while detokenizer.stop_text is None and count < len(answer):
        text += detokenizer.push(answer[count])
        count += 1
    ends = [number + 1 for number, token_id in enumerate(answer) if token_id == special and number + 1 > min_tokens]
    assert count == (ends[0] if ends else len(answer))
    assert detokenizer.stop_text == (stop if ends else None)
    assert text + detokenizer.flush() == decoded(family, answer[:count])


def test_a_stop_text_before_a_special_token_comes_first(llama2: ModelTokenizer) -> None:
    answer = [*llama2.backend.encode("a b", add_special_tokens=False).ids, llama2.backend.token_to_id("</s>")]
    detokenizer = llama2.detokenizer([], ("b", "</s>"))
    assert "".join(detokenizer.push(token_id) for token_id in answer[:-1]) == "a "
    assert detokenizer.stop_text == "b"


@pytest.mark.parametrize("seed", range(60))
def test_special_tokens_are_part_of_the_text_where_they_are_shown(family: ModelTokenizer, seed: int) -> None:
    rng, backend = random.Random(seed), family.backend
    special = [number for number, token in backend.get_added_tokens_decoder().items() if token.special]
    answer: list[int] = []
    for _ in range(rng.randrange(2, 20)):
        answer += backend.encode(rng.choice(WORDS), add_special_tokens=False).ids
        answer += rng.choices(special, k=rng.randrange(3))
    prompt = backend.encode("hello a").ids
    shown = [str(backend.decode(ids, skip_special_tokens=False)) for ids in (prompt, prompt + answer)]
    expected = shown[1].removeprefix(shown[0])
    start = rng.randrange(len(expected))
    stop = expected[start : start + rng.randrange(1, 30)]
    for stops, end in (((), len(expected)), ((stop,), expected.index(stop))):
        detokenizer = family.detokenizer(prompt, stops, skip_special_tokens=False)
        assert read(detokenizer, answer) == expected[:end], seed
