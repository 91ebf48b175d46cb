"""Grammars of strangers: refused by name, or served within the engines' limits."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.token_rules import TokenRules, tokens_in
from kaveri.errors import DeadlineExceeded, EngineError, InvalidArgument, NoCapacity
from kaveri.models import resolve_model
from kaveri.text import grammar_check
from kaveri.text.grammar_check import GrammarChecker
from kaveri.text.grammars import Grammars
from tests.support.hostile_grammars import HOSTILE

EOS = frozenset({0})
_MOST_BYTES = 900 * 2**20
"""Of the process that checks: the limit of 512 MiB, and what Python and the tokenizer take."""


def soon() -> float:
    return time.monotonic() + 60


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(Tokenizer.from_file(f"{resolve_model('kaveri-tiny')}/tokenizer.json"), 1536)
    yield made
    await made.close()


def serve(grammars: Grammars, grammar: Grammar) -> None:
    """Draw the beginning of an answer at random."""
    rng, history = random.Random(1), list[int]()
    rules = TokenRules(ResolvedParams(grammar=grammar), history, 0, 1536, EOS, grammars)
    while len(history) < 60 and (not history or history[-1] not in EOS):
        allowed = rules.changes(len(history)).allowed
        assert allowed is not None
        history.append(int(rng.choice(np.flatnonzero(tokens_in(allowed, 1536)))))


async def test_hostile_grammars_are_refused_by_name_or_served(checker: GrammarChecker) -> None:
    grammars, refused, failed = Grammars("kaveri-tiny", 1536, EOS), 0, []
    for name, make in HOSTILE.items():
        refusal = None
        try:
            grammar = make()
            await checker.check(grammar, soon())
        except InvalidArgument as error:
            refusal = error
        if refusal is not None:
            assert refusal.field == "params.grammar", name
            assert refusal.limit, name
            refused += 1
            continue
        await asyncio.wrap_future(grammars.prepare(grammar))
        try:
            serve(grammars, grammar)
        except EngineError:
            failed.append(name)
    assert refused > 40
    # Those whose first tokens do not show it: their requests fail, and no other.
    assert failed == []
    process = checker._process
    assert process is not None
    status = await asyncio.to_thread(Path(f"/proc/{process.pid}/status").read_text)
    assert int(status.split("VmHWM:")[1].split()[0]) * 1024 < _MOST_BYTES


async def test_a_process_that_dies_of_a_grammar_is_started_again(checker: GrammarChecker) -> None:
    huge = Grammar.json_schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9})
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="1 s and 512 MiB"):
            await checker.check(huge, soon())
    # It is not tried twice.
    assert checker._process is None
    await checker.check(Grammar.regex("a+"), soon())
    with pytest.raises(InvalidArgument, match="unclosed group"):
        await checker.check(Grammar.regex("(a"), soon())


async def test_checks_that_wait_end_at_their_deadlines(checker: GrammarChecker) -> None:
    await checker._lock.acquire()
    with pytest.raises(DeadlineExceeded):
        await checker.check(Grammar.regex("a"), time.monotonic() + 0.01)
    checker._lock.release()
    several = [Grammar.regex(f"a{{{number}}}") for number in range(1, 9)]
    await asyncio.gather(*(checker.check(grammar, soon()) for grammar in several))


async def test_a_check_that_is_cancelled_leaves_no_answer_to_the_next_one(checker: GrammarChecker) -> None:
    await checker.check(Grammar.regex("a"), soon())
    task = asyncio.create_task(checker.check(Grammar.regex("(a"), soon()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await checker.check(Grammar.regex("b"), soon())


async def test_a_valid_grammar_is_taken_though_router_and_process_stand_still(checker: GrammarChecker) -> None:
    await checker.check(Grammar.regex("a"), soon())
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.1, time.sleep, 1.3)
    asyncio.get_running_loop().call_later(1.5, os.kill, checker._process.pid, signal.SIGCONT)
    await checker.check(Grammar.json_schema({"properties": {"q": {"type": "integer"}}}), soon())


async def test_a_check_whose_process_others_kill_is_tried_again(checker: GrammarChecker) -> None:
    await checker.check(Grammar.regex("a"), soon())
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.1, os.kill, checker._process.pid, signal.SIGKILL)
    await checker.check(Grammar.regex("b"), soon())
    # While it is idle, too.
    os.kill(checker._process.pid, signal.SIGKILL)
    await checker._process.wait()
    await checker.check(Grammar.regex("c"), soon())


async def test_a_process_that_does_not_answer_is_not_the_grammars_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(Grammar.regex("a"), soon())
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(grammar_check, "_ANSWER_S", 0.2)
    with pytest.raises(NoCapacity, match="does not answer"):
        await checker.check(Grammar.regex("b"), soon())
    monkeypatch.undo()
    await checker.check(Grammar.regex("b"), soon())


async def test_a_grammar_that_takes_too_long_is_refused_and_not_tried_again(checker: GrammarChecker) -> None:
    primes = (104729, 104723, 104717, 104711, 104707, 104701)
    properties = {f"p{prime}": {"type": "integer", "multipleOf": prime} for prime in primes}
    slow = Grammar.json_schema({"properties": properties, "required": [*properties]})
    await checker.check(Grammar.regex("a"), soon())
    assert checker._process is not None
    first = checker._process.pid
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="1 s and 512 MiB"):
            await checker.check(slow, soon())
        assert checker._process is None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
