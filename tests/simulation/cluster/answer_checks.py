"""Proves of every answer that its tokens, text and end are what they must be.

Tokens: each was drawn by an engine, for this request, on KV of exactly the prompt and the tokens that the client got
before it. Where engines do not diverge, the answer also equals the model's own. Answers that have failed or were
cancelled are held to the same as far as they go. Does not verify when anything arrives.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from tokenizers import Tokenizer

from kaveri.domain.sampling import FinishReason, ResolvedParams, SamplingParams
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.engine.stepwise.runner import DrawnToken, SequenceSlice
from kaveri.engine.token_rules import TokenRules
from kaveri.text.grammars import Grammars
from tests.simulation.cluster.chats import answer_violations
from tests.simulation.cluster.draws import DrawRecord, DrawRun, seed_salt
from tests.simulation.cluster.outcomes import RequestOutcome
from tests.simulation.cluster.plan import ROUTER_DEFAULTS, FaultKind
from tests.simulation.cluster.tokenizer import make_grammars, texts_of
from tests.simulation.cluster.world import World

_MOST_ENDED = 2
"""Instances that a request which raises may end: the second time it is a suspect, and to blame."""
STALE_DRAWS_S = 1.0
"""An engine may draw for a request so long after its end, or after the last fault: time for an abort to arrive."""


def check_answers(world: World) -> list[str]:
    """What is wrong with what the clients of a schedule got."""
    backend = world.tokenizer.backend
    defaults = tuple(ROUTER_DEFAULTS.get(router.name, SamplingParams()) for router in world.plan.routers)
    grammars = world.new_grammars()
    checker = AnswerChecker(world.model, world.draws, backend, world.plan.divergent, defaults, grammars)
    return [each for outcome in world.outcomes for each in checker.violations(outcome)]


_HARMLESS = (FaultKind.STORE_AWAY, FaultKind.STORE_REFUSES)
"""A store that cannot be used for a while ends no lease."""


def check_attempts(world: World) -> list[str]:
    """Where no instance fails no request is placed twice."""
    if any(fault.kind not in _HARMLESS for fault in world.plan.faults):
        return []
    return [
        f"{outcome.request_id} at {outcome.router} took {timing.server.attempts} attempts, and nothing had failed"
        for outcome in world.outcomes
        if outcome.chunks and (timing := outcome.chunks[-1].timing) is not None and timing.server.attempts > 1
    ]


def check_router_deaths(world: World) -> list[str]:
    """The death of one of several routers, or its drain, costs no prompt and no token: each request runs once at
    prefill and once at each decode instance that it moves to, at most. Only a request that reports on its prompt begins
    again: see docs/fault-tolerance.md."""
    plan = world.plan
    routers = [instance.name for instance in plan.routers]
    deaths = (FaultKind.KILL, FaultKind.RESTART, FaultKind.DRAIN, FaultKind.UNDRAIN)
    others = [fault for fault in plan.faults if fault.kind not in deaths or fault.target not in routers]
    # When two die, a client may find none within the orphan grace.
    if len(routers) < 2 or len(plan.faults) != 1 or others:
        return []
    sent = [outcome.request_id for outcome in world.outcomes]
    reports = {outcome.request_id for outcome in world.outcomes if outcome.params.prompt_logprobs is not None}
    counts = Counter(run.key.request_id for run in world.draws.computed)
    counts.subtract(world.draws.moves)
    return [
        f"{request_id} was computed {counts[request_id]} times, and only routers had ended"
        for request_id in dict.fromkeys(sent)
        if counts[request_id] > (4 if request_id in reports else 2) and sent.count(request_id) == 1
    ]


def check_requests_of_death(world: World) -> list[str]:
    """A request that raises in the forward pass ends two instances at most, and none of these requests gets past the
    token at which it raises. Other faults may keep what an instance has said of it from its router: one more each. So
    may other requests that raise: one more, as a step of an attempt that was lost to them may still be under way."""
    deaths, others = world.draws.deaths, [fault for fault in world.plan.faults if fault.kind is not FaultKind.DEATH]
    counts = Counter(run.key.request_id for run in world.draws.deadly_runs)
    return [
        *(
            f"{request_id} has ended {count} instances"
            for request_id, count in counts.items()
            if count > _MOST_ENDED + len(others) + (len(deaths) > 1)
        ),
        *(
            f"{outcome.request_id} has {len(outcome.token_ids)} tokens, and raises at token {death.at_index}"
            for outcome in world.outcomes
            if (death := deaths.get(outcome.request_id)) is not None and len(outcome.token_ids) > death.at_index
        ),
    ]


def check_reservations(world: World) -> list[str]:
    """No reservation may wait for its KV longer than the configuration allows."""
    return [
        f"a ticket of {engine.info.epoch:x} is valid for {engine.longest_ticket_s:g} s"
        for engine in world.engines
        if engine.longest_ticket_s > world.plan.reservation_ttl_s
    ]


def check_kv(world: World) -> list[str]:
    """Every block of KV that an engine read was the one that had been written for the request."""
    return list(world.draws.problems)


def check_stale_draws(world: World) -> list[str]:
    """No engine works on for requests that have ended. Faults may keep the news from it while they last, and a
    request without its router goes on for the orphan grace."""
    ended_s: dict[str, float] = {}
    for outcome in world.outcomes:
        # Until its last sending has ended.
        at_s = outcome.ended_s if outcome.ended_s is not None else world.now()
        ended_s[outcome.request_id] = max(ended_s.get(outcome.request_id, 0.0), at_s)
    healed_s = world.healed_s if world.plan.faults else 0.0
    found = []
    for run, last_s in world.draws.last_s.items():
        if run.key.request_id not in ended_s:
            continue  # no client's: an engine is tried out before its instance registers
        late_s = last_s - max(ended_s[run.key.request_id], healed_s)
        if late_s > STALE_DRAWS_S + (world.plan.orphan_grace_s if world.plan.faults else 0.0):
            found.append(f"{run.key.request_id} was still computed {late_s:.3f} s after its end")
    return found


@dataclass(frozen=True, slots=True)
class AnswerChecker:
    """Checks the answers of one schedule."""

    model: FakeModel
    draws: DrawRecord
    backend: Tokenizer
    divergent: bool
    defaults: tuple[SamplingParams, ...] = (SamplingParams(),)
    """What the routers fill in: an answer is drawn with those of one of them."""
    grammars: Grammars | None = None
    """None: over tokens that are bytes."""

    def violations(self, outcome: RequestOutcome) -> list[str]:
        """What is wrong with an answer, as sentences."""
        prompt = self._prompt(outcome)
        found = [
            *_index_violations(outcome),
            *self._draw_violations(outcome, prompt),
            *self._token_violations(outcome, prompt),
            *self._text_violations(outcome, prompt),
            *self._finish_violations(outcome, prompt),
            *self._logprob_violations(outcome),
            *self._prompt_violations(outcome, prompt),
            *self._chat_violations(outcome),
        ]
        return [f"{outcome.request_id} at {outcome.router}, sending {outcome.send_number}: {each}" for each in found]

    def _prompt(self, outcome: RequestOutcome) -> tuple[int, ...]:
        if outcome.prompt is not None:
            return outcome.prompt
        return tuple(self.backend.encode(outcome.text or "").ids)

    def _draw_violations(self, outcome: RequestOutcome, prompt: tuple[int, ...]) -> Iterator[str]:
        chain = self.model.chain(prompt)
        owners = _Owners()
        for index, token_id in enumerate(outcome.token_ids):
            runs = self.draws.runs(outcome.request_id, index, chain, token_id)
            if not runs:
                yield f"no engine drew token {index} ({token_id}) on the KV of the tokens before it"
                return
            if self.divergent and (returned := owners.accept(runs)) is not None:
                yield f"token {index} came from {returned}, which another one had replaced"
            chain = self.model.chain((token_id,), chain)

    def _token_violations(self, outcome: RequestOutcome, prompt: tuple[int, ...]) -> Iterator[str]:
        token_ids = outcome.token_ids
        possible = [outcome.params.resolved(each) for each in self.defaults]
        if self.divergent or any(params.temperature > 0 and params.seed is None for params in possible):
            return
        answers = [expected_answer(self.model, prompt, params, len(token_ids), self.grammars) for params in possible]
        if token_ids not in answers:
            right = max(sum(takewhile(bool, map(eq, token_ids, expected))) for expected in answers)
            wanted = sorted({token_id for each in answers for token_id in each[right : right + 1]})
            yield f"token {right} is {token_ids[right]}, not one of {wanted}"

    def _text_violations(self, outcome: RequestOutcome, prompt: tuple[int, ...]) -> Iterator[str]:
        text = "".join(chunk.text for chunk in outcome.chunks)
        expected = self._texts(outcome, prompt)
        # What was undecided when it was cancelled is not said by the decode instance.
        may_lack_its_end = outcome.direct and outcome.finish is FinishReason.CANCELLED
        if outcome.finish is None or may_lack_its_end:
            if not any(whole.startswith(text) for whole, _ in expected):
                yield f"the text so far is {text!r}, not a beginning of {_shown(expected)}"
        elif text not in [whole for whole, _ in expected]:
            yield f"the text is {text!r}, not {_shown(expected)}"
        if outcome.finish is FinishReason.LENGTH and all(stopped for _, stopped in expected):
            yield f"the answer went on past a stop text: {text!r}"

    def _texts(self, outcome: RequestOutcome, prompt: tuple[int, ...]) -> set[tuple[str, bool]]:
        token_ids = outcome.token_ids
        # The token that ends an answer has no text.
        if outcome.finish is FinishReason.STOP and token_ids and token_ids[-1] in outcome.params.stop_token_ids:
            token_ids = token_ids[:-1]
        return texts_of(self.backend, prompt, token_ids, outcome.params.stop, outcome.params.min_tokens)

    def _finish_violations(self, outcome: RequestOutcome, prompt: tuple[int, ...]) -> Iterator[str]:
        params, token_ids = outcome.params, outcome.token_ids
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {self.model.eos_token_id})
        if any(token_id in stops for token_id in token_ids[:-1]):
            yield "the answer went on past a token that ends it"
        room = self.model.max_model_len - len(prompt)
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        if len(token_ids) > longest:
            yield f"{len(token_ids)} tokens, where {longest} were allowed"
        if outcome.finish is FinishReason.LENGTH and len(token_ids) != longest:
            yield f"ended by length after {len(token_ids)} of {longest} tokens"
        if outcome.finish is FinishReason.STOP:
            if len(token_ids) <= params.min_tokens:
                yield f"ended by a stop after {len(token_ids)} tokens, where {params.min_tokens} come first"
            stopped = any(stopped for _, stopped in self._texts(outcome, prompt))
            if not stopped and token_ids[-1:] and token_ids[-1] not in stops:
                yield f"ended by a stop that is not in {token_ids[-3:]}"
        # A request that was cancelled early may end before its prompt was counted.
        if (
            outcome.finish is not None
            and outcome.chunks
            and (token_ids or outcome.finish is not FinishReason.CANCELLED)
        ):
            usage = outcome.chunks[-1].usage
            counted = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else None
            if counted != (len(prompt), len(token_ids)):
                yield f"usage {counted} of {len(prompt)} and {len(token_ids)} tokens"

    def _logprob_violations(self, outcome: RequestOutcome) -> Iterator[str]:
        logprobs = [each for chunk in outcome.chunks for each in chunk.logprobs]
        wanted = outcome.params.logprobs
        expected = (
            [self.model.logprobs(token_id, wanted) for token_id in outcome.token_ids] if wanted is not None else []
        )
        if logprobs != expected:
            yield f"log-probabilities {logprobs}, not {expected}"

    def _chat_violations(self, outcome: RequestOutcome) -> Iterator[str]:
        if outcome.chat is not None:
            yield from answer_violations(outcome.chat, "".join(chunk.text for chunk in outcome.chunks), outcome.finish)

    def _prompt_violations(self, outcome: RequestOutcome, prompt: tuple[int, ...]) -> Iterator[str]:
        """What is said of the prompt comes once, in order, and all of it before the first token."""
        told = [token for chunk in outcome.chunks for token in chunk.prompt_tokens]
        count = outcome.params.prompt_logprobs
        expected = [
            (token_id, self.model.prompt_logprobs(place, token_id, count or 0) if place else None)
            for place, token_id in enumerate(prompt if count is not None else ())
        ]
        if [(token.token_id, token.logprobs) for token in told] != expected[: len(told)]:
            yield f"prompt_logprobs {told}, not {expected}"
        elif len(told) < len(expected) and outcome.token_ids:
            yield f"a token came before {len(expected) - len(told)} prompt_logprobs"
        if any(chunk.prompt_tokens for chunk in outcome.chunks[_first_with_tokens(outcome) :]):
            yield "prompt_logprobs came behind a token"


def expected_answer(
    model: FakeModel,
    prompt: tuple[int, ...],
    params: ResolvedParams,
    token_count: int,
    grammars: Grammars | None = None,
) -> tuple[int, ...]:
    """The first tokens of the answer where engines do not diverge.

    params: with a seed where there is a temperature. grammars: None: over tokens that are bytes.
    """
    chain, token_ids = model.chain(prompt), list(prompt)
    rules = None
    if params.has_rules:
        eos_token_ids = frozenset({model.eos_token_id})
        grammars = grammars or make_grammars(None, model.vocab_size)
        rules = TokenRules(params, token_ids, len(prompt), model.vocab_size, eos_token_ids, grammars)
    for index in range(token_count):
        drawn = model.drawn(SequenceSlice((), 0, (), True, index, params, rules), chain ^ seed_salt(params))
        if not isinstance(drawn, DrawnToken):
            # Behind the end of an answer with a grammar.
            break
        token_ids.append(drawn.token_id)
        chain = model.chain(token_ids[-1:], chain)
    return tuple(token_ids[len(prompt) :])


def _index_violations(outcome: RequestOutcome) -> Iterator[str]:
    count = 0
    for chunk in outcome.chunks:
        if chunk.index != count:
            yield f"tokens from {chunk.index} on came behind {count} tokens"
            return
        count += len(chunk.token_ids)


def _first_with_tokens(outcome: RequestOutcome) -> int:
    found = (number for number, chunk in enumerate(outcome.chunks) if chunk.token_ids)
    return next(found, len(outcome.chunks))


def _shown(expected: set[tuple[str, bool]]) -> str:
    return " or ".join(sorted(repr(text) for text, _ in expected))


class _Owners:
    """Follows who drew the accepted tokens of one answer. Engines that diverge may still draw an equal token."""

    def __init__(self) -> None:
        self._current: tuple[DrawRun, ...] = ()
        self._replaced: set[DrawRun] = set()

    def accept(self, runs: tuple[DrawRun, ...]) -> DrawRun | None:
        """Takes the instances that may have drawn the next token. Returns one that was replaced before and is back."""
        going_on = tuple(run for run in self._current if run in runs)
        if going_on:
            self._current = going_on
            return None
        if len(self._current) == 1:
            self._replaced.add(self._current[0])
        self._current = tuple(run for run in runs if run not in self._replaced)
        return None if self._current else runs[0]
