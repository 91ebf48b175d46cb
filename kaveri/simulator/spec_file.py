"""Reads a simulation from the file that `kaveri up --config` reads. Raises ConfigError, naming file and key.

It follows those settings of [up], [router], [prefill], [decode] and [colocated], and those before the sections, that a
simulation supports. Whatever `engine` says, steps take the time of `latency_model`. Dynamic instances follow [prefill]
and [decode], whichever phase they started with, and the engine settings of both must be equal.
"""

import enum
import math
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from kaveri.config.settings import size_bytes
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import ConfigError
from kaveri.kv.transports.link_speed import parse_link_speed
from kaveri.latency.model import load_latency_model
from kaveri.policy.flipping import FlipPolicy, FlipRules
from kaveri.policy.placement import DEFAULT_THRESHOLDS, HeavyThresholds
from kaveri.simulator.spec import ClusterSpec, CopySpec, DecodeSpec, Overheads, PoolSpec, PrefillSpec, RouterSpec

ValueT = TypeVar("ValueT")
EnumT = TypeVar("EnumT", bound=enum.Enum)
_SECTIONS = ("up", "router", "prefill", "decode", "colocated")
_POOL_KEYS = (
    "latency_model",
    "time_scale",
    "kv_cache_memory",
    "block_tokens",
    "chunk_tokens",
    "max_batch",
    "max_model_len",
)
_THRESHOLDS = ("heavy_output_tokens", "heavy_prompt_tokens")
_QUEUE_KEYS = ("max_queue", "prefill_policy", "prefill_sched_batch")
_BATCH_KEYS = ("decode_policy", "decode_range_end")
_COPY_KEYS = ("replication", "replica_memory", "replica_min_tokens", "replication_rate", "orphan_grace_s")
_ROUTER_KEYS = ("placement_policy", "max_attempts", "unavailable_after_s", "monitor_interval_s")
_FLIP_FIELDS = {
    "slo_ttft_s": "ttft_s",
    "slo_tpot_s": "tpot_s",
    "min_prefill": "min_prefill",
    "min_decode": "min_decode",
    "flip_cooldown_s": "cooldown_s",
}
"""Fields of FlipRules by the router's setting."""
_FLIP_KEYS = ("flip_policy", *_FLIP_FIELDS)
"""Settings of the router that only dynamic instances follow in a simulation."""
_KEYS: Mapping[str, tuple[str, ...]] = {
    "up": ("prefill", "decode", "colocated", "dynamic", "routers"),
    "router": (*_ROUTER_KEYS, *_FLIP_KEYS),
    "prefill": (*_POOL_KEYS, *_QUEUE_KEYS, "decode_placement", "kv_link", *_THRESHOLDS),
    "decode": (*_POOL_KEYS, *_BATCH_KEYS, *_COPY_KEYS, *_THRESHOLDS),
    "colocated": (*_POOL_KEYS, *_QUEUE_KEYS, *_BATCH_KEYS, *_COPY_KEYS, "kv_link", *_THRESHOLDS),
}
_FOLLOWED_ENGINE = ("engine", "timed")
_KV_CACHE_MEMORY = 128 * 2**20
_REPLICA_MEMORY = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """A spec read from a file, and the file's settings that a simulation ignores."""

    spec: ClusterSpec
    not_simulated: tuple[str, ...]
    """Ignored settings as "[section] key"."""


def read_spec(
    path: Path,
    known: Mapping[str, Collection[str]],
    preset: Mapping[str, Mapping[str, object]] | None = None,
) -> ReadSpec:
    """Read a simulation from a `kaveri up` file. known: valid keys by section; ConfigError for others. preset: values
    by section, for keys that the file lacks."""
    table = _read_toml(path, "SPEC")
    preset = preset or {}
    shared = {key: value for key, value in table.items() if not isinstance(value, dict)}
    given = {key: value for key, value in table.items() if key not in shared}
    not_simulated = _not_simulated(path, known, shared, given, preset)
    sections = {
        section: _Section(path, section, {**preset.get(section, {}), **shared, **table.get(section, {})})
        for section in _SECTIONS
    }
    up, router, prefill, decode, both = (sections[section] for section in _SECTIONS)
    colocated_count, dynamic_count = up.whole("colocated", 0), up.whole("dynamic", 0)
    if colocated_count:
        if up.whole("prefill", 0) or up.whole("decode", 0):
            reason = f"is {colocated_count}; these instances do both phases, so leave prefill and decode out"
            raise ConfigError(f"{path} [up] colocated", reason)
        prefill = decode = both
    if dynamic_count:
        # A preset with a fixed split only says how many instances it has; its policies hold for dynamic ones too.
        if colocated_count or any(given.get("up", {}).get(name) for name in ("prefill", "decode")):
            reason = f"is {dynamic_count}; these instances do either phase, so leave prefill, decode and colocated out"
            raise ConfigError(f"{path} [up] dynamic", reason)
        if _pool(prefill) != _pool(decode):
            reason = f"is {dynamic_count}; [prefill] and [decode] must then have the same engine settings"
            raise ConfigError(f"{path} [up] dynamic", reason)
    fixed = not colocated_count and not dynamic_count
    if up.whole("routers", 1) != 1:
        raise ConfigError(f"{path} [up] routers", f"is {up.values['routers']}; one router is simulated")
    spec = ClusterSpec(
        prefill_count=up.whole("prefill", 2) if fixed else 0,
        decode_count=up.whole("decode", 2) if fixed else 0,
        colocated_count=colocated_count,
        dynamic_count=dynamic_count,
        flips=_flips(router) if dynamic_count else FlipRules(),
        prefill=PrefillSpec(
            engine=_pool(prefill),
            thresholds=HeavyThresholds(
                prefill.whole("heavy_output_tokens", DEFAULT_THRESHOLDS.output_tokens),
                prefill.whole("heavy_prompt_tokens", DEFAULT_THRESHOLDS.prompt_tokens),
            ),
            **prefill.fields_of(PrefillSpec, (*_QUEUE_KEYS, "decode_placement")),
        ),
        decode=DecodeSpec(engine=_pool(decode), copies=_copies(decode), **decode.fields_of(DecodeSpec, _BATCH_KEYS)),
        router=RouterSpec(**router.fields_of(RouterSpec, _ROUTER_KEYS)),
        link=prefill.read("kv_link", parse_link_speed) if prefill.text("kv_link", "") else None,
    )
    return ReadSpec(spec, not_simulated)


def _not_simulated(
    path: Path,
    known: Mapping[str, Collection[str]],
    shared: Mapping[str, object],
    sections: Mapping[str, Mapping[str, object]],
    preset: Mapping[str, Mapping[str, object]],
) -> tuple[str, ...]:
    """Return the settings that a simulation ignores. Raises ConfigError for settings that no service has."""
    found: list[str] = []
    unfollowed = () if sections.get("up", {}).get("dynamic") else _FLIP_KEYS
    for section, values in sections.items():
        if section not in known:
            raise ConfigError(f"{path} [{section}]", f"is no section; there are {', '.join(sorted(known))}")
        for key in values:
            if section in _SECTIONS and key in _KEYS[section] and key not in unfollowed:
                continue
            if section != "up" and key not in known[section]:
                raise ConfigError(f"{path} [{section}] {key}", "is no setting of Kaveri")
            if (key, values[key]) != _FOLLOWED_ENGINE:
                found.append(f"[{section}] {key}")
    simulated = {key for keys in _KEYS.values() for key in keys if key not in unfollowed}
    for key in shared:
        if not any(key in names for names in known.values()):
            raise ConfigError(f"{path} {key}", "is no setting of Kaveri")
        if key not in simulated and (key, shared[key]) != _FOLLOWED_ENGINE:
            found.append(key)
    found += [
        f"[{section}] {key}"
        for section, values in preset.items()
        for key in values
        if key not in _KEYS.get(section, ()) and not (section == "up" and key == "predictor")
    ]
    return tuple(dict.fromkeys(found))


def read_overheads(path: Path) -> Overheads:
    """Read Overheads from a TOML file with any of its fields, in seconds. Raises ConfigError."""
    table = _read_toml(path, "--overheads")
    names = [entry.name for entry in fields(Overheads)]
    for key, value in table.items():
        if key not in names:
            raise ConfigError(f"{path} {key}", f"is no overhead; there are {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path} {key}", f"is {value!r}; it must be a number of seconds")
    return Overheads(**table)


def _read_toml(path: Path, flag: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(flag, f"cannot read {path}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Section:
    path: Path
    name: str
    values: Mapping[str, Any]

    def whole(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._error(key, value, "a whole number of at least 0")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def one_of(self, key: str, default: object, kind: type[EnumT]) -> EnumT:
        value = self.values.get(key, default)
        try:
            return kind(value)
        except ValueError as error:
            raise self._error(key, value, f"one of {', '.join(str(member.value) for member in kind)}") from error

    def fields_of(self, kind: type, keys: Sequence[str]) -> dict[str, Any]:
        """Return the given ones of `keys`, parsed as the types of `kind`'s fields of the same names."""
        types, found = get_type_hints(kind), dict[str, Any]()
        for key in keys:
            if key not in self.values:
                continue
            if types[key] is int:
                found[key] = self.whole(key, 0)
            elif types[key] is float:
                found[key] = self.number(key, 0.0)
            else:
                found[key] = self.one_of(key, None, types[key])
        return found

    def read(self, key: str, parse: Callable[[str], ValueT]) -> ValueT:
        try:
            return parse(str(self.values[key]))
        except ValueError as error:
            raise ConfigError(f"{self.path} [{self.name}] {key}", str(error)) from error

    def _error(self, key: str, value: object, limit: str) -> ConfigError:
        return ConfigError(f"{self.path} [{self.name}] {key}", f"is {value!r}; it must be {limit}")


def _flips(router: _Section) -> FlipRules:
    """Read the rules by which dynamic instances change their phase, as the router does."""
    values: dict[str, Any] = {
        name: router.whole(key, 0) if key.startswith("min_") else router.number(key, 0.0)
        for key, name in _FLIP_FIELDS.items()
        if key in router.values
    }
    if router.text("flip_policy", "auto") != "auto":
        policy = router.one_of("flip_policy", None, FlipPolicy)
    elif values.get("ttft_s") and values.get("tpot_s"):
        policy = FlipPolicy.SLO
    else:
        reason = "is auto, and without targets nothing changes; set slo_ttft_s and slo_tpot_s"
        raise ConfigError(f"{router.path} [router] flip_policy", reason)
    try:
        return FlipRules(policy=policy, **values)
    except ConfigError as error:
        key = next((key for key, name in _FLIP_FIELDS.items() if name == error.field), error.field)
        raise ConfigError(f"{router.path} [router] {key}", error.reason) from error


def _copies(section: _Section) -> CopySpec:
    # As in the timed engine, whose tokens have the size of the fake model's.
    block_bytes = FakeModel().layout.token_bytes * section.whole("block_tokens", 16)
    memory, rate = (
        section.read(key, size_bytes) if key in section.values else default
        for key, default in (("replica_memory", _REPLICA_MEMORY), ("replication_rate", 0))
    )
    return CopySpec(
        replica_blocks=memory // block_bytes,
        # At least one block is sent in each second.
        blocks_per_s=max(1.0, rate / block_bytes) if rate else 0.0,
        **section.fields_of(CopySpec, ("replication", "replica_min_tokens", "orphan_grace_s")),
    )


def _pool(section: _Section) -> PoolSpec:
    name = section.text("latency_model", "")
    if not name:
        reason = "is not given; name a bundled model, or a file of `kaveri profile`"
        raise ConfigError(f"{section.path} [{section.name}] latency_model", reason)
    block_tokens = section.whole("block_tokens", 16)
    if block_tokens < 1:
        raise ConfigError(f"{section.path} [{section.name}] block_tokens", "is 0; it must be at least 1")
    time_scale = section.number("time_scale", 1.0)
    if not 0 < time_scale < math.inf:
        reason = f"is {time_scale!r}; it must be a number above 0"
        raise ConfigError(f"{section.path} [{section.name}] time_scale", reason)
    pool_bytes = section.read("kv_cache_memory", size_bytes) if "kv_cache_memory" in section.values else None
    token_bytes = FakeModel().layout.token_bytes
    total_blocks = (_KV_CACHE_MEMORY if pool_bytes is None else pool_bytes) // (token_bytes * block_tokens)
    longest = min(FakeModel().max_model_len, total_blocks * block_tokens)
    return PoolSpec(
        latency=load_latency_model(name).slowed(time_scale),
        total_blocks=total_blocks,
        block_tokens=block_tokens,
        chunk_tokens=section.whole("chunk_tokens", 512) or 512,
        max_batch=section.whole("max_batch", 64),
        max_model_len=section.whole("max_model_len", 0) or longest,
    )
