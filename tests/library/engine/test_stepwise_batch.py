"""Contents and order of one step."""

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey
from kaveri.engine.stepwise.sequence import Sequence, SequencePhase, form_step


def _sequence(name: str, token_count: int, computed: int = 0) -> Sequence:
    return Sequence(
        EngineKey(name, 1),
        ResolvedParams(),
        [1] * token_count,
        0,
        SequencePhase.RUNNING,
        [*range(100)],
        computed=computed,
    )


def _step(
    running: list[Sequence], prefilling: list[Sequence], chunk_tokens: int, suspect_first: bool = True
) -> list[tuple[str, int]]:
    planned = form_step(running, prefilling, chunk_tokens, suspect_first=suspect_first)
    return [(sequence.key.request_id, token_count) for sequence, token_count in planned]


def test_several_prompts_share_a_chunk_in_order() -> None:
    prefilling = [_sequence("a", 20), _sequence("b", 5), _sequence("c", 50)]
    assert _step([], prefilling, 32) == [("a", 20), ("b", 5), ("c", 7)]


def test_long_prompt_is_spread_over_chunks_from_where_it_came_to() -> None:
    long = _sequence("a", 70)
    chunks = []
    while long.pending:
        ((_, token_count),) = _step([], [long], 32)
        part = long.slice(token_count)
        chunks.append((part.start, len(part.token_ids), part.draw))
        long.computed += token_count
    assert chunks == [(0, 32, False), (32, 32, False), (64, 6, True)]


def test_later_prompt_waits_until_the_chunk_has_room() -> None:
    assert _step([], [_sequence("a", 32), _sequence("b", 1)], 32) == [("a", 32)]


def test_decode_takes_no_room_from_the_chunk_and_recomputation_comes_before_prompts() -> None:
    running = [
        _sequence("decode", 9, computed=8),
        _sequence("again", 30, computed=10),
        _sequence("last", 4, computed=3),
    ]
    prefilling = [_sequence("a", 40)]
    assert _step(running, prefilling, 32) == [("decode", 1), ("last", 1), ("again", 20), ("a", 12)]


def test_decode_goes_on_beside_a_recomputation_that_fills_the_chunk() -> None:
    running = [_sequence("again", 100), _sequence("decode", 9, computed=8)]
    assert _step(running, [_sequence("a", 40)], 32) == [("decode", 1), ("again", 32)]


def test_nothing_to_do_is_an_empty_step() -> None:
    assert _step([], [], 32) == []


def _suspect(name: str, token_count: int, computed: int = 0) -> Sequence:
    sequence = _sequence(name, token_count, computed)
    sequence.suspect_until = 1
    return sequence


def test_a_suspect_is_computed_alone_and_takes_turns_with_the_others() -> None:
    running = [_sequence("a", 9, 8), _suspect("b", 9, 8), _suspect("c", 30, 10)]
    prefilling = [_suspect("d", 4), _sequence("e", 4)]
    assert _step(running, prefilling, 16) == [("b", 1)]
    assert _step(running, prefilling, 16, suspect_first=False) == [("a", 1), ("e", 4)]
    assert _step(running[2:], prefilling, 16) == [("c", 16)]
    assert _step([], prefilling, 16) == [("d", 4)]
    assert _step([], prefilling[:1], 16, suspect_first=False) == [("d", 4)]


def test_a_request_that_has_passed_the_step_that_raised_is_no_suspect() -> None:
    running = [_suspect("a", 9, 8), _suspect("b", 9, 8)]
    running[0].draw_index = running[1].draw_index = 1
    assert _step(running, [], 64) == [("a", 1), ("b", 1)]
