"""The profile file, versioned JSON: measured step times of an engine, and the results derived from them.

`kaveri profile` writes it. Prefill and decode instances read the chunk size from it, the timed engine the latency
model.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.latency.machine import Machine
from kaveri.latency.model import LatencyModel, check_latency_model, record_of

FORMAT = "kaveri-profile"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledEngine:
    """Identity of a measured engine. A profile is valid for engines of equal engine, dtype, device and fingerprint."""

    engine: str
    """Name of the engine's model runner."""
    model: str
    """Name or path of the model; the same weights may have another name elsewhere."""
    model_fingerprint: str
    """Equal only for the same weights and shape; for a timed engine, the name of its latency model."""
    dtype: str
    device: str
    """"cpu" or "cuda"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Durations of one kind of step, measured `repeats` times."""

    median_s: float
    min_s: float
    max_s: float
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """Measured durations of a step of prompt chunks."""

    prompts: tuple[tuple[int, int], ...]
    """The chunk of each prompt: [start, stop). The KV of [0, start) is already computed."""
    times: StepTimes

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(stop - start for start, stop in self.prompts)

    @property
    def squared_tokens(self) -> int:
        """Attention term of the latency model: stop**2 - start**2, summed over all prompts."""
        return sum(stop * stop - start * start for start, stop in self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Measured durations of a step that samples one token for each of `batch` requests."""

    batch: int
    context_tokens: int
    """Context of each request, including the step's own token."""
    times: StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Smallest chunk size at which prefill throughput no longer rises much."""

    chunk_tokens: int
    """Smallest measured chunk whose throughput is at least `share` of the best."""
    share: float
    best_tokens_per_s: float
    reached: bool
    """False if throughput still rose at the largest chunk, which chunk_tokens then is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """Relative error of a fit on points left out of it, as a share of the measured medians."""

    mean: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Contents of a profile file: all results of `kaveri profile`."""

    created: str
    """ISO 8601, UTC."""
    kaveri: str
    """Version of Kaveri that measured."""
    engine: ProfiledEngine
    machine: Machine
    saturation: Saturation
    latency_model: LatencyModel
    prefill_error: FitError
    decode_error: FitError
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens per step that saturate the hardware; larger chunks would only delay other requests."""
        return self.saturation.chunk_tokens

    def require_for(self, engine: ProfiledEngine, latency_model: LatencyModel | None = None) -> None:
        """Raise ConfigError if the profile was measured on another engine, model, dtype or device.

        latency_model: that of a timed engine, for which a profile with the same latency model is always valid.
        """
        if latency_model is not None and latency_model == self.latency_model:
            return
        for name in ("engine", "dtype", "device"):
            measured, wanted = getattr(self.engine, name), getattr(engine, name)
            if measured != wanted:
                raise ConfigError("profile", f"was measured on {name} {measured}; here it is {wanted}")
        if self.engine.model_fingerprint != engine.model_fingerprint:
            measured, wanted = (f"{entry.model} ({entry.model_fingerprint})" for entry in (self.engine, engine))
            raise ConfigError("profile", f"was measured on model {measured}; here it is {wanted}")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON. Raises OSError."""
    document = {"format": FORMAT, "version": VERSION, **asdict(profile)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read_profile(path: str | Path) -> Profile:
    """Read a profile written by `kaveri profile`. Raises ConfigError."""
    path = Path(path).expanduser()
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("profile", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("profile", f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise ConfigError("profile", f"{path} is no file of `kaveri profile`")
    if (version := document.pop("version", None)) != VERSION:
        raise ConfigError("profile", f"{path} has version {version!r}; this is for {VERSION}: measure again")
    try:
        profile = record_of(document, Profile)
        check_latency_model(profile.latency_model)
        if profile.chunk_tokens < 1:
            raise ValueError(f"saturation.chunk_tokens is {profile.chunk_tokens}; it must be at least 1")
    except ValueError as error:
        raise ConfigError("profile", f"{path} is no profile: {error}") from error
    return profile
