"""Forms a step: its sequences, and the number of tokens of each. Pure: reads sequences, changes none."""

from collections.abc import Iterable
from typing import NamedTuple

from kaveri.engine.contract import MAX_SCORED_TOKENS
from kaveri.engine.stepwise.sequence import Sequence


class PlannedSlice(NamedTuple):
    """A step's part of a sequence: its next `token_count` tokens."""

    sequence: Sequence
    token_count: int


def form_step(
    running: Iterable[Sequence], prefilling: Iterable[Sequence], chunk_tokens: int, *, suspect_first: bool = True
) -> list[PlannedSlice]:
    """Form a step: one token of every running sequence that only lacks its newest, and a chunk of up to `chunk_tokens`.

    The chunk is filled in order, first with what preempted sequences recompute, then with prompts; several share a
    chunk, a long one is spread over several, and each sequence records its progress (TetriInfer, arXiv 2401.11181,
    section 3.3.3). At most MAX_SCORED_TOKENS are of prompts whose log-probabilities are reported.

    A suspect (EngineRequest.suspect_until) is computed alone: otherwise it could be blamed for a first failure of
    another. suspect_first: True to compute the first suspect, if there is one; False the others.
    """
    running, prefilling = tuple(running), tuple(prefilling)
    # Most have never been one.
    suspects = [each for each in (*running, *prefilling) if each.suspect_until and each.is_suspect]
    if suspects and suspect_first:
        return _packed((), suspects[:1], chunk_tokens)
    innocent = [each for each in running if each not in suspects] if suspects else running
    planned = _packed(innocent, [each for each in prefilling if each not in suspects], chunk_tokens)
    return planned or _packed((), suspects[:1], chunk_tokens)


def _packed(running: Iterable[Sequence], prefilling: Iterable[Sequence], chunk_tokens: int) -> list[PlannedSlice]:
    planned: list[PlannedSlice] = []
    recomputing: list[Sequence] = []
    for sequence in running:
        if sequence.pending == 1:
            planned.append(PlannedSlice(sequence, 1))
        else:
            recomputing.append(sequence)
    room, scored_room = chunk_tokens, MAX_SCORED_TOKENS
    for queue in (recomputing, prefilling):
        for sequence in queue:
            if room == 0:
                return planned
            token_count = min(room, sequence.pending)
            if sequence.is_scored:
                token_count = min(token_count, scored_room)
                scored_room -= token_count
            if token_count:
                planned.append(PlannedSlice(sequence, token_count))
                room -= token_count
    return planned
