"""A fitted model of how long a step takes on some hardware, read from a file. No clock.

The form is that of DistServe's appendix A (arXiv 2401.09670), as in its simulator: a prefill step takes a constant,
plus a time per token, plus a time per squared length for attention; a decode step takes a constant, plus a time per
token of context, plus a time per request. kaveri/profiling measures steps and fits the coefficients.
"""

import json
import math
import types
import typing
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kaveri.errors import ConfigError

RecordT = TypeVar("RecordT")
_BUNDLED = Path(__file__).parent / "bundled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLatency:
    """Coefficients of the duration of a step of prompt chunks, in seconds."""

    step_s: float
    token_s: float
    token_squared_s: float
    """Seconds per squared prompt length. A chunk [start, stop) counts stop**2 - start**2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLatency:
    """Coefficients of the duration of a decode step of at least `min_batch` requests, in seconds."""

    min_batch: int
    step_s: float
    context_token_s: float
    request_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Model of engine step durations, for one LLM on one type of hardware."""

    name: str
    source: str
    """Origin of the coefficients."""
    prefill: PrefillLatency
    decode: tuple[DecodeLatency, ...]
    """Ascending by min_batch; the first has min_batch 1."""

    def step_s(self, spans: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step. Of chunks and decodes, only the larger constant counts: weights are read once.

        spans: for each sequence in the batch, the first position that the step computes and the number of positions.
        """
        return self.mixed_step_s(spans, 0, 0)

    def mixed_step_s(self, spans: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        """Return the seconds of a step of `spans`, as in step_s(), plus `decodes` requests of one token each.
        context_tokens: their total context, including the tokens that this step computes."""
        constant_s = variable_s = 0.0
        for start, count in spans:
            stop = start + count
            if count == 1 and start > 0:
                decodes += 1
                context_tokens += stop
            else:
                constant_s = self.prefill.step_s
                squared = stop * stop - start * start
                variable_s += count * self.prefill.token_s + squared * self.prefill.token_squared_s
        if decodes:
            fit = self.decode_fit(decodes)
            constant_s = max(constant_s, fit.step_s)
            variable_s += context_tokens * fit.context_token_s + decodes * fit.request_s
        return constant_s + variable_s

    def slowed(self, scale: float) -> "LatencyModel":
        """Return a copy in which every step takes `scale` times as long."""
        if scale == 1:
            return self
        name = f"{self.name}, {scale:g} times slower"
        return self.scaled(name, self.source, weights=scale, attention=scale, prefill_step=scale)

    def scaled(
        self, name: str, source: str, *, weights: float, attention: float, prefill_step: float = 1.0
    ) -> "LatencyModel":
        """Return a copy with scaled matrix terms, attention terms, and constant of steps with prompt chunks."""
        prefill = PrefillLatency(
            step_s=self.prefill.step_s * prefill_step,
            token_s=self.prefill.token_s * weights,
            token_squared_s=self.prefill.token_squared_s * attention,
        )
        decode = tuple(
            replace(
                fit,
                step_s=fit.step_s * weights,
                context_token_s=fit.context_token_s * attention,
                request_s=fit.request_s * weights,
            )
            for fit in self.decode
        )
        return LatencyModel(name=name, source=source, prefill=prefill, decode=decode)

    def decode_fit(self, decodes: int) -> DecodeLatency:
        """Return the coefficients for a step in which `decodes` requests sample a token."""
        return self.decode[bisect_right(self.decode, decodes, key=lambda entry: entry.min_batch) - 1]


def bundled_latency_models() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _BUNDLED.glob("*.json")))


def load_latency_model(name_or_file: str) -> LatencyModel:
    """Load a bundled latency model by name, or from a JSON file of that form or a profile. Raises ConfigError."""
    if name_or_file in bundled_latency_models():
        path = _BUNDLED / f"{name_or_file}.json"
    else:
        path = Path(name_or_file).expanduser()
    if not name_or_file or not path.is_file():
        known = ", ".join(bundled_latency_models())
        raise ConfigError("latency_model", f"is {name_or_file!r}, which is no file and none of: {known}")
    try:
        document = json.loads(path.read_text())
        # A profile (kaveri/latency/profile.py) contains a latency model.
        if isinstance(document, dict) and "latency_model" in document:
            document = document["latency_model"]
        model = record_of(document, LatencyModel)
        check_latency_model(model)
        return model
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("latency_model", f"{path} is no latency model: {error}") from error


def check_latency_model(model: LatencyModel) -> None:
    """Raise ValueError unless `decode` has coefficients for every batch size: min_batch rises from 1."""
    batches = [entry.min_batch for entry in model.decode]
    if batches[:1] != [1] or batches != sorted(set(batches)):
        raise ValueError(f"decode has min_batch {batches}; they must rise, from 1")


def record_of(document: object, kind: type[RecordT], where: str = "the file") -> RecordT:
    """Build a dataclass from parsed JSON, recursively. Numbers must be finite and at least 0. Raises ValueError, naming
    the field."""
    assert is_dataclass(kind)
    names = {entry.name for entry in fields(kind)}
    if not isinstance(document, dict) or set(document) != names:
        found = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise ValueError(f"{where} has {found}; it must have {sorted(names)}")
    hints = typing.get_type_hints(kind)
    within = "" if where == "the file" else f"{where}."
    return kind(**{name: _value(f"{within}{name}", document[name], hints[name]) for name in names})


def _value(where: str, value: object, hint: Any) -> Any:
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return record_of(value, hint, where)
    if isinstance(hint, types.GenericAlias):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{where} has {len(value)} entries; it must have {len(kinds)}")
        pairs = zip(value, kinds, strict=True)
        return tuple(_value(f"{where}[{index}]", entry, kind) for index, (entry, kind) in enumerate(pairs))
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} is {value!r:.80}; it must be a {hint.__name__}")
    if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} is {value!r}; it must be at least 0")
    return value
