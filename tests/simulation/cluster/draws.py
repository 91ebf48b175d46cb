"""Keeps every token that the engines of a simulated cluster drew, and the KV that it was drawn on."""

import struct
import zlib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = 2**64 - 1


class DrawRun(NamedTuple):
    """One request on one life of an engine: all its tokens are drawn on one set of KV blocks."""

    epoch: int
    key: EngineKey


class InjectedError(NamedTuple):
    """Where a request raises an exception."""

    at_index: int
    """Of the token that is to be drawn, within the answer."""
    in_draw: bool
    """Else: in the forward pass."""


class DrawRecord:
    """The draws of one schedule, shared by all its engines.

    chain: digest of all tokens whose KV was read for the draw, the newest one included (FakeModel.chain).
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        """clock: the simulation's time, the same for all."""
        self._clock = clock
        self.problems: list[str] = []
        """KV that was not what had been written for the request."""
        self.last_s: dict[DrawRun, float] = {}
        """When each run drew its last token."""
        self.last_run: dict[tuple[str, int], DrawRun] = {}
        """Who drew each token of each request last, by request id and index."""
        self.computed: dict[DrawRun, None] = {}
        """Every run of which something was computed."""
        self.let_go: dict[str, int] = {}
        """Of requests that an engine has let go and no other has taken yet: tokens whose KV the holder has."""
        self.moves: Counter[str] = Counter()
        """How often engines have let a request go, by request id."""
        self.deaths: dict[str, InjectedError] = {}
        """Of the requests that raise, by request id."""
        self.deadly_runs: list[DrawRun] = []
        """Every run that has ended its engine."""
        self._runs: dict[tuple[str, int, int, int], list[DrawRun]] = {}

    def add(self, run: DrawRun, draw_index: int, chain: int, token_id: int) -> None:
        """`run` drew `token_id` as token `draw_index` of the answer, on KV of the tokens behind `chain`."""
        self.last_s[run] = self._clock()
        self.last_run[run.key.request_id, draw_index] = run
        runs = self._runs.setdefault((run.key.request_id, draw_index, chain, token_id), [])
        if run not in runs:
            runs.append(run)

    def report(self, problem: str) -> None:
        """An engine found KV that it must not have."""
        self.problems.append(problem)

    def runs(self, request_id: str, draw_index: int, chain: int, token_id: int) -> tuple[DrawRun, ...]:
        """Who drew this token of this request on KV of exactly these tokens."""
        return tuple(self._runs.get((request_id, draw_index, chain, token_id), ()))


def seed_salt(params: ResolvedParams) -> int:
    """What a draw depends on beside the tokens before it: nothing where it is greedy, else the seed and the parameters
    that a router may have filled in."""
    if params.temperature == 0:
        return 0
    shape = zlib.crc32(struct.pack("<ffI", params.temperature, params.top_p, params.top_k))
    return (((params.seed or 0) + 1) * _GOLDEN ^ shape << 32) & _MASK


def life_salt(run: DrawRun) -> int:
    """What a draw depends on as well where lives diverge."""
    return (run.epoch + run.key.serial) * _GOLDEN & _MASK
