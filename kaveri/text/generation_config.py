"""Reads a model's generation_config.json: end-of-sequence ids and sampling defaults. Does not import torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import cached_file

from kaveri.domain.sampling import SamplingParams, whole_number
from kaveri.errors import ConfigError, InvalidArgument
from kaveri.models import resolve_model
from kaveri.telemetry.logs import get_logger

FILE_NAME = "generation_config.json"
AUTO, NONE = "auto", "none"
"""Values of --generation-config that are not a path: the model's own file, no file."""
_USED = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}
"""Supported keys, to their names in SamplingParams. As vLLM's ModelConfig.get_diff_sampling_param."""
_UNUSED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([],),
}
"""Unsupported keys that change answers in transformers' generate or in vLLM, with the values that have no effect."""


@dataclass(frozen=True, slots=True)
class FoundGenerationConfig:
    """Values of a model's generation_config, and the file that they come from; without one, defaults of config.json."""

    origin: str
    values: Mapping[str, Any]
    """Without nulls."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters of a model for requests that leave them unset."""

    params: SamplingParams = field(default_factory=SamplingParams)
    """Parameters that the model sets, of those in _USED; all others are unset."""
    most_tokens: int | None = None
    """Max tokens of every answer, whatever the request states. None: no such limit."""


def read_generation_config(source: str | Path, config: Any = None) -> FoundGenerationConfig:
    """Read the generation_config of a model's folder or hub id; without that file, transformers' defaults for its
    config.json. config: if already loaded with AutoConfig. Raises ConfigError, naming --model."""
    path = cached_file(str(source), FILE_NAME, _raise_exceptions_for_missing_entries=False)
    if path is None:
        whole = AutoConfig.from_pretrained(source) if config is None else config
        made = GenerationConfig.from_model_config(whole).to_diff_dict()
        return FoundGenerationConfig(f"the config.json of {source}", made)
    return _read_file(Path(path), "--model")


def read_sampling_defaults(given: str, model: str) -> SamplingDefaults:
    """Read the sampling defaults, and log which values are used and which are ignored. Blocks. given: value of
    --generation-config: AUTO, NONE, or a path to a file or its folder, whose max_new_tokens then limits every answer,
    as in vLLM. model: a path, a hub id or a bundled name. Raises ConfigError, naming the flag."""
    if given == NONE:
        return SamplingDefaults()
    if given == AUTO:
        found = read_generation_config(resolve_model(model))
    else:
        path = Path(given) / FILE_NAME if Path(given).is_dir() else Path(given)
        if not path.is_file():
            raise ConfigError(
                "--generation-config", f"{path} is not a file; it must be auto, none, or a file or its folder"
            )
        found = _read_file(path, "--generation-config")
    params = parse_defaults(found, "--model" if given == AUTO else "--generation-config")
    if params.chosen:
        get_logger().info("generation_config_used", file=found.origin, values=params.chosen)
    if unused := unused_values(found):
        advice = "answers are drawn without them; --generation-config none ignores the whole file"
        get_logger().warning("generation_config_unused", file=found.origin, values=unused, advice=advice)
    return SamplingDefaults(params, None if given == AUTO else params.max_tokens)


def parse_defaults(found: FoundGenerationConfig, flag: str = "--model") -> SamplingParams:
    """Convert a generation_config to parameters for requests that leave them unset; do_sample is ignored, as in vLLM.
    flag: named in errors. Pure. Raises ConfigError for an invalid value."""
    chosen: dict[str, Any] = {}
    for key, name in _USED.items():
        value = found.values.get(key)
        if value is None:
            continue
        # vLLM's value for "all".
        chosen[name] = 0 if (key, value) == ("top_k", -1) else value
        try:
            SamplingParams(**{name: chosen[name]})
        except InvalidArgument as error:
            advice = "--generation-config none ignores it" if flag == "--model" else "another file, or auto or none"
            reason = f"{found.origin} has the {key} {value!r:.80}; it must be {error.limit} ({advice})"
            raise ConfigError(flag, reason) from error
    return SamplingParams(**chosen)


def unused_values(found: FoundGenerationConfig) -> dict[str, Any]:
    """Return the values that would change answers in transformers or vLLM and that Kaveri ignores, by key. Pure."""
    return {name: value for name, value in found.values.items() if name in _UNUSED and value not in _UNUSED[name]}


def _read_file(path: Path, flag: str) -> FoundGenerationConfig:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(flag, f"{path} cannot be read: {error!s:.200}") from error
    if not isinstance(values, dict):
        raise ConfigError(flag, f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return FoundGenerationConfig(str(path), {name: value for name, value in values.items() if value is not None})


def end_token_ids(found: FoundGenerationConfig, config: Any, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence ids: generation_config's, else those of `config`, the model's. Drops and logs ids
    outside [0, vocab_size), which transformers ignores. Raises ConfigError for a value without ids."""
    ids, undrawable, origin = parse_end_token_ids(found, config, vocab_size)
    if undrawable:
        get_logger().warning(
            "token_ids_dropped", file=origin, key="eos_token_id", token_ids=undrawable, vocab_size=vocab_size
        )
    return ids


def parse_end_token_ids(
    found: FoundGenerationConfig, config: Any, vocab_size: int
) -> tuple[frozenset[int], list[int], str]:
    """Return the end-of-sequence ids below vocab_size, the others, and their file's name. Pure. Raises ConfigError."""
    value, origin = found.values.get("eos_token_id"), found.origin
    if value is None:
        value, origin = getattr(config.get_text_config(), "eos_token_id", None), "config.json"
    listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
    ids = [whole_number(each) for each in listed]
    if None in ids:
        reason = f"{origin} has the eos_token_id {value!r:.80}; it must be a token id, or a list of them"
        raise ConfigError("--model", reason)
    known = {each for each in ids if each is not None}
    drawable = frozenset(each for each in known if 0 <= each < vocab_size)
    return drawable, sorted(known - drawable), origin
