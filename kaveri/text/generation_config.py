"""What a model's generation_config says: the tokens that end an answer. Needs no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file

from kaveri.domain.sampling import whole_number
from kaveri.errors import ConfigError
from kaveri.telemetry.logs import get_logger

FILE_NAME = "generation_config.json"


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
