"""Parses vLLM's own options, given as a JSON object or a YAML or JSON file. Imports vLLM only to check names."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from kaveri.errors import ConfigError


def parse_engine_args(text: str) -> Mapping[str, Any]:
    """Parse vLLM's options from a JSON object such as {"max_num_seqs": 64}, or from a file's path, with or without @.
    Names may also be spelled as on vLLM's command line. Values are not validated. Raises ValueError."""
    text = text.strip()
    if not text:
        return {}
    if text.startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON object: {error}") from error
    else:
        values = _read(Path(text.removeprefix("@")).expanduser())
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{text[:120]!r} holds no mapping of option names to values")
    return {name.removeprefix("--").replace("-", "_"): value for name, value in values.items()}


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); write a JSON object or name a file") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {error}") from error


def require_known(engine_args: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option name that the installed vLLM does not know."""
    from vllm import EngineArgs

    known = [option.name for option in fields(EngineArgs)]
    for name in engine_args:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError("engine_args", f"{name!r} is no option of vLLM's engine{hint}")
