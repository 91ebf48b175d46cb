"""What a model's generation_config says: the tokens that end an answer, and what is not used of it. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.utils import cached_file

from kaveri.domain.sampling import whole_number
from kaveri.errors import ConfigError
from kaveri.models import resolve_model
from kaveri.telemetry.logs import get_logger

FILE_NAME = "generation_config.json"
_SAMPLING: dict[str, tuple[Any, ...]] = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (0, 50)}
"""What changes answers that are drawn, with the values that change nothing; 50 is transformers' own default of top_k,
which vLLM does not use either unless a file says so."""
_ALWAYS: dict[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "repetition_penalty": (1.0,),
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
    "max_new_tokens": (),
    "stop_strings": ([],),
}
"""What changes answers of transformers' generate or of vLLM, with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class FoundGenerationConfig:
    """The values of one model, and the file that they were read from."""

    origin: str
    values: Mapping[str, Any]
    """Without those that are null."""


def read_generation_config(source: str | Path, config: Any) -> FoundGenerationConfig:
    """Of a model's folder or hub id. Without the file: what transformers makes of the model's own configuration.

    config: the model's, as AutoConfig reads it. Raises ConfigError, naming --model.
    """
    path = cached_file(str(source), FILE_NAME, _raise_exceptions_for_missing_entries=False)
    if path is None:
        made = GenerationConfig.from_model_config(config).to_diff_dict()
        return FoundGenerationConfig(f"the config.json of {source}", made)
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--model", f"{path} cannot be read: {error!s:.200}") from error
    if not isinstance(values, dict):
        raise ConfigError("--model", f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return FoundGenerationConfig(str(path), {name: value for name, value in values.items() if value is not None})


def unused_values(found: FoundGenerationConfig) -> dict[str, Any]:
    """The values that would change answers of transformers' generate or of vLLM, and that Kaveri does not use. Pure."""
    return {
        name: value
        for name, value in found.values.items()
        if name in (known := _SAMPLING | _ALWAYS) and value not in known[name]
    }


def say_unused_values(model: str) -> None:
    """Logs one line with the unused values of a path, a hub id or a bundled name, if there are any. Blocks. Raises
    ConfigError, naming --model."""
    source = resolve_model(model)
    found = read_generation_config(source, AutoConfig.from_pretrained(source))
    if unused := unused_values(found):
        get_logger().warning(
            "generation_config_unused",
            file=found.origin,
            values=unused,
            advice="requests that are to be answered with them must give temperature, top_p and top_k themselves",
        )


def end_token_ids(found: FoundGenerationConfig, config: Any, vocab_size: int) -> frozenset[int]:
    """The ids that end an answer: generation_config's, else the text model's configuration's.

    Ids outside [0, vocab_size) are dropped with a line in the log: no token can be one of them, and transformers'
    generate goes on as if they were not there. Raises ConfigError for a value that holds no ids.
    """
    ids, undrawable, origin = parse_end_token_ids(found, config, vocab_size)
    if undrawable:
        get_logger().warning(
            "token_ids_dropped", file=origin, key="eos_token_id", token_ids=undrawable, vocab_size=vocab_size
        )
    return ids


def parse_end_token_ids(
    found: FoundGenerationConfig, config: Any, vocab_size: int
) -> tuple[frozenset[int], list[int], str]:
    """As end_token_ids: the ids below vocab_size, the others, and the file that has them. Pure."""
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
