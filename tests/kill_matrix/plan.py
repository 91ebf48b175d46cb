"""Questions and faults of a kill matrix run, drawn from a seed. Pure."""

import enum
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kaveri import ChatOptions, Grammar, SamplingParams
from tests.support.thinking_model import THINK_END_ID

FREEZES_S = (0.3, 1.0, 5.0)
MOST_DOWN_S = 1.0
_STOP_TEXT = "the"


class HitKind(enum.StrEnum):
    KILLED = "killed"
    FROZEN = "frozen"
    CUT_OFF = "cut off"
    """No traffic with any other process, Redis and clients included."""
    LINK_CUT = "link cut"
    """No traffic with one other process."""
    DRAINED = "drained"
    """Stopped by SIGTERM, then restarted."""
    FLIPPED = "flipped"
    """An instance with an engine is ordered to serve the other phase, and later its own again."""


class RequestPhase(enum.StrEnum):
    """Phase of a request at which a fault happens: when the next request reaches it."""

    SENT = "sent"
    FIRST_TOKEN = "first token"
    MIDDLE = "middle"
    LAST_TOKENS = "last tokens"
    OVER = "over"


class Aim(enum.StrEnum):
    ANY = "any"
    OWNER = "owner"
    """Instance that has the request."""
    HOLDER = "holder"
    """Instance that has the copy of its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFault:
    """A fault to cause. The process that it hits is chosen when it happens."""

    kind: HitKind
    role: str
    aim: Aim
    phase: RequestPhase
    after_s: float
    """After the request reaches the phase."""
    lasts_s: float
    choice: float
    """Selects one of several processes; in [0, 1)."""


_WEIGHTS = {"router": 4, "prefill": 4, "decode": 7, "redis": 1, "predictor": 0.5, "client": 1}


def draw_fault(rng: random.Random, kinds: Sequence[HitKind]) -> DrawnFault:
    role = rng.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
    kind = rng.choice(kinds)
    if role == "client" or (role == "redis" and kind is HitKind.DRAINED):
        kind = HitKind.KILLED
    if kind is HitKind.FLIPPED and role not in ("prefill", "decode"):
        kind = HitKind.KILLED
    killed = kind in (HitKind.KILLED, HitKind.DRAINED)
    return DrawnFault(
        kind=kind,
        role=role,
        aim=rng.choice((Aim.OWNER, Aim.OWNER, Aim.HOLDER, Aim.ANY)) if role in ("prefill", "decode") else Aim.ANY,
        phase=rng.choice(tuple(RequestPhase)),
        after_s=rng.choice((0.0, rng.uniform(0.0, 0.1))),
        lasts_s=rng.uniform(0.0, MOST_DOWN_S) if killed else rng.choice(FREEZES_S),
        choice=rng.random(),
    )


@dataclass(frozen=True, slots=True)
class MatrixQuestion:
    prompt: tuple[int, ...]
    params: SamplingParams
    chat: ChatOptions | None = None
    """Options of a conversation. If set, a message is sent in place of the prompt's token ids."""

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of Client.stream() beside the parameters."""
        if self.chat is None:
            return {"prompt_token_ids": self.prompt}
        return {"messages": [{"role": "user", "content": f"Count to {self.prompt}."}], "chat": self.chat}

    @property
    def has_rules(self) -> bool:
        given = self.params
        return any((given.grammar, given.bad_words, given.logit_bias, given.repetition_penalty, given.presence_penalty))


def draw_questions(
    rng: random.Random, count: int, largest_token: int, *, chats: bool = False
) -> tuple[MatrixQuestion, ...]:
    """chats: every fourth is a conversation with tools or reasoning, for a model that knows them."""
    questions = [_question(rng, number, largest_token) for number in range(count)]
    if chats:
        for number, (params, chat) in zip(range(3, count, 4), itertools.cycle(_CHATS), strict=False):
            asked = questions[number]
            old = asked.params
            changed = SamplingParams(
                max_tokens=150, temperature=old.temperature, seed=old.seed, logprobs=old.logprobs, **params
            )
            questions[number] = MatrixQuestion(asked.prompt[:5], changed, chat)
    return tuple(questions)


def _question(rng: random.Random, number: int, largest_token: int) -> MatrixQuestion:
    prompt_tokens = rng.choice((rng.randint(1, 40), rng.randint(60, 200), rng.randint(200, 500)))
    max_tokens = rng.choice((rng.randint(1, 3), rng.randint(10, 60), rng.randint(60, 150), rng.randint(60, 150)))
    sampled = number % 2 == 1
    prompt = tuple(rng.randint(1, largest_token) for _ in range(prompt_tokens))
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if sampled else 0.0,
        seed=rng.getrandbits(32) if sampled else None,
        ignore_eos=True,
        logprobs=rng.choice((None, 0, 2)),
        stop=(_STOP_TEXT,) if number % 5 == 0 else (),
    )
    return MatrixQuestion(prompt, replace(params, **_RULES[number // 2 % len(_RULES)]))


_RULES: Sequence[Mapping[str, Any]] = (
    {},
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"presence_penalty": 1.5, "bad_words": ("the", "a")},
    {"min_p": 0.05, "logit_bias": {300: 2.0, 301: -100.0}, "allowed_token_ids": tuple(range(280, 420))},
    {"grammar": Grammar.regex("([a-z]{2,9} ){3,40}"), "ignore_eos": False, "stop": ()},
    {
        "grammar": Grammar.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 30}),
        "ignore_eos": False,
        "frequency_penalty": 0.2,
        "stop": (),
    },
)
"""What questions ask of their tokens, in turn."""

_DAYS = {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 8, "maxItems": 12}
_PARAMETERS = {"type": "object", "properties": {"days": _DAYS}, "required": ["days"], "additionalProperties": False}
_TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": _PARAMETERS}} for name in ("plan", "rest"))
_THINKS = {"enable_thinking": True}
# The longer it thinks, the likelier it ends.
_THOUGHT = {"logit_bias": ((THINK_END_ID, 9.0),), "frequency_penalty": 0.6}
_CHATS: Sequence[tuple[Mapping[str, Any], ChatOptions]] = (
    ({}, ChatOptions(tools=_TOOLS, tool_choice="required")),
    (_THOUGHT, ChatOptions(tools=_TOOLS, template_arguments=_THINKS)),
    (_THOUGHT, ChatOptions(tools=_TOOLS, tool_choice="rest", template_arguments=_THINKS)),
    ({"grammar": Grammar.json_schema(_PARAMETERS)}, ChatOptions(tools=_TOOLS)),
)
"""What conversations ask for, in turn."""
