"""Latency models by degree of tensor parallelism: measured, or estimated from a measured one. Pure.

Estimates follow DistServe's appendix A (arXiv 2401.09670): h, n and m are divided by the degree of tensor parallelism,
and only the terms that contain them change.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.latency.model import LatencyModel, bundled_latency_models, load_latency_model
from kaveri.latency.profile import read_profile
from kaveri.latency.saturation import find_saturation
from kaveri.planner.catalog import Hardware, ModelShape, bundled_models, read_model_shape

_BUNDLED = re.compile(r"(?P<family>(?P<model>.+)-(?P<accelerator>[a-z]\d+))-tp(?P<tp>\d+)")
_CHUNKS = tuple(range(128, 16_384 + 1, 128))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLatency:
    """Latency model of an instance with one degree of tensor parallelism, and its origin."""

    latency: LatencyModel
    file: str
    """Value of the setting `latency_model` that selects it; empty if no file contains it."""
    is_estimate: bool
    """True if it was derived from another model or degree instead of measured."""


def read_step_latencies(
    profiles: Sequence[str], model: ModelShape, hardware: Hardware, degrees: Sequence[int]
) -> dict[int, StepLatency]:
    """Return latency models by degree of tensor parallelism (TP); degrees without a profile are estimated.

    profiles: bundled families such as opt-13b-a100, bundled names, files, or TP=FILE for TP other than 1. A bundled
    family of another model is scaled to this one. Raises ConfigError for a profile of other hardware.
    """
    if not profiles:
        raise ConfigError("--profile", "is not given; name a bundled family, or a file of `kaveri profile`")
    measured: dict[int, tuple[StepLatency, ModelShape]] = {}
    for text in profiles:
        measured |= _read(text, model, hardware)
    return {tp: _of_degree(tp, measured, model) for tp in degrees}


def saturating_tokens(latency: LatencyModel) -> int:
    """Return the smallest chunk with 95 % of the best modelled prefill throughput (DistServe's L_m, section 3.1)."""
    curve = [(chunk, chunk / latency.step_s([(0, chunk)])) for chunk in _CHUNKS]
    return find_saturation(curve).chunk_tokens


def scaled_to_model(latency: LatencyModel, measured: ModelShape, wanted: ModelShape) -> LatencyModel:
    """Estimate another model's latency at the same tensor parallelism by DistServe's appendix A. Matrix terms scale
    with layers * (4h^2 + 2hm), attention with layers * h. A prefill step's constant is kept (C3), a decode step's is
    the time to read the weights (C4)."""
    weights = wanted.layers * wanted.layer_weights / (measured.layers * measured.layer_weights)
    attention = wanted.layers * wanted.hidden_size / (measured.layers * measured.hidden_size)
    return _scaled(latency, f"{wanted.name} as {latency.name}", weights, attention)


def scaled_to_degree(latency: LatencyModel, measured_tp: int, wanted_tp: int) -> LatencyModel:
    """Estimate another degree of tensor parallelism for the same model, ignoring communication."""
    share = measured_tp / wanted_tp
    return _scaled(latency, f"{latency.name} as tp{wanted_tp}", share, share)


def _scaled(latency: LatencyModel, name: str, weights: float, attention: float) -> LatencyModel:
    source = f"estimated from {latency.name} by DistServe's appendix A; not measured"
    return latency.scaled(name, source, weights=weights, attention=attention)


def _of_degree(tp: int, measured: Mapping[int, tuple[StepLatency, ModelShape]], model: ModelShape) -> StepLatency:
    # Prefer a lower degree: it includes less communication than there will be, and so is not too slow.
    nearest = min(measured, key=lambda known: (abs(known - tp), known))
    step, shape = measured[nearest]
    latency = step.latency
    if nearest == tp and shape == model:
        return step
    if shape != model:
        latency = scaled_to_model(latency, shape, model)
    if nearest != tp:
        latency = scaled_to_degree(latency, nearest, tp)
    return StepLatency(latency=latency, file="", is_estimate=True)


def _read(text: str, model: ModelShape, hardware: Hardware) -> dict[int, tuple[StepLatency, ModelShape]]:
    bundled = [found for name in bundled_latency_models() if (found := _BUNDLED.fullmatch(name)) is not None]
    family = [found for found in bundled if text in (found["family"], found[0])]
    if family:
        _require_accelerator(family[0]["accelerator"], text, hardware)
        shape = read_model_shape(family[0]["model"])
        return {
            int(found["tp"]): (
                StepLatency(latency=load_latency_model(found[0]), file=found[0], is_estimate=False),
                shape,
            )
            for found in family
        }
    degree, equals, name = text.partition("=")
    path = name if equals else text
    if equals and not (degree.isdigit() and int(degree) >= 1):
        raise ConfigError("--profile", f"is {text!r}; write a bundled family, FILE, or TP=FILE such as 2=tp2.json")
    if not Path(path).expanduser().is_file():
        families = sorted({found["family"] for found in bundled})
        raise ConfigError("--profile", f"is {text!r}, which is no file and none of: {', '.join(families)}")
    profile = read_profile(path)
    _require_accelerator(profile.machine.accelerator or profile.machine.cpu, path, hardware)
    measured = StepLatency(latency=profile.latency_model, file=path, is_estimate=False)
    return {int(degree) if equals else 1: (measured, model)}


def model_of(profiles: Sequence[str]) -> str:
    """Return the bundled model that the first profile is named after; empty if there is none."""
    found = [name for name in bundled_models() if profiles and profiles[0].startswith(f"{name}-")]
    return found[0] if found else ""


def _require_accelerator(measured: str, profile: str, hardware: Hardware) -> None:
    if hardware.accelerator.lower() not in measured.lower():
        reason = f"{profile} was measured on {measured}; --hardware {hardware.name} is {hardware.accelerator}"
        raise ConfigError("--profile", reason)
