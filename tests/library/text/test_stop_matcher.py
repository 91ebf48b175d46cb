import asyncio
import random

import pytest

from kaveri.text.answer import Answer
from kaveri.text.stop_matcher import StopMatcher
from kaveri.text.tokenizer import ModelTokenizer


def pieces_of(text: str, rng: random.Random) -> list[str]:
    pieces = []
    while text:
        size = rng.choice((1, 1, 2, 3, 8, 40))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("seed", range(300))
def test_a_text_in_pieces_is_decided_as_the_whole_text_is(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", [3, 1], k=rng.randrange(1, 80)))
    stop = tuple("".join(rng.choices("ab", [3, 1], k=rng.randrange(1, 12))) for _ in range(rng.randrange(1, 5)))
    matcher, given, seen = StopMatcher(stop), "", ""
    for piece in pieces_of(text, rng):
        ignores = rng.random() < 0.2
        before, seen = len(seen), seen + piece
        decided, found = matcher.push(piece, ignores=ignores)
        given += decided
        ends = [
            (end, end - len(each), each)
            for each in stop
            for end in range(before + 1, len(seen) + 1)
            if seen[:end].endswith(each)
        ]
        if ends and not ignores:
            _, start, first = min(ends)
            assert (given, found) == (seen[:start], first), seed
            return
        assert found is None, seed
        held = max(size for each in stop for size in range(len(each)) if seen.endswith(each[:size]))
        assert given == seen[: len(seen) - held], seed
    assert given + matcher.flush() == text, seed


def test_a_stop_text_that_ends_in_the_known_text_is_not_found_again() -> None:
    matcher = StopMatcher(("ab",), known_characters=6)
    assert matcher.push("xabx", ignores=False) == ("xabx", None)
    assert matcher.push("xx", ignores=False) == ("xx", None)
    assert matcher.push("yab", ignores=False) == ("y", "ab")


def test_a_stop_text_is_found_that_begins_in_the_known_text() -> None:
    matcher = StopMatcher(("abc",), known_characters=6)
    assert matcher.push("xxxxa", ignores=False) == ("xxxx", None)
    assert matcher.push("bc", ignores=False) == ("", "abc")


def test_a_copy_goes_on_alone() -> None:
    matcher = StopMatcher(("abc",))
    assert matcher.push("xab", ignores=False) == ("x", None)
    other = matcher.copy()
    assert other.push("d", ignores=False) == ("abd", None)
    assert matcher.push("c", ignores=False) == ("", "abc")


async def test_other_work_goes_on_while_received_tokens_are_detokenized(tokenizer: ModelTokenizer) -> None:
    token_ids = [300 + number % 50 for number in range(20_000)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        await Answer(tokenizer.detokenizer([300], ("never",))).go_on_after(token_ids, 0, ())
        counting.cancel()
    assert turns >= len(token_ids) // 1024
