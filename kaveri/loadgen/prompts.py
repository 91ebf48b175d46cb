"""Reads a user's own prompts."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from kaveri.errors import ConfigError
from kaveri.loadgen.workload import Prompt

_KINDS = ("prompt", "messages", "prompt_token_ids")


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """The first `count` prompts of a file, blank lines left out.

    A .jsonl file has an object per line with exactly one of "prompt" (text), "messages" (role and content each) and
    "prompt_token_ids"; other members are ignored. Any other file has a text per line. Raises ConfigError with the line
    and the reason.
    """
    try:
        with path.open() as file:
            rows = _objects(file, path) if path.suffix == ".jsonl" else (line.strip() for line in file)
            taken = list(islice((row for row in rows if row), count))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", f"{path} cannot be read: {error}") from error
    if not taken:
        raise ConfigError("--prompts", f"{path} has no prompts")
    return taken


def _objects(file: TextIO, path: Path) -> Iterator[Prompt]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield _prompt(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError("--prompts", f"{path}, line {number}: {error}") from error


def _prompt(row: Any) -> Prompt:
    """Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"is no object with one of {', '.join(_KINDS)}")
    given = [name for name in _KINDS if name in row]
    if len(given) != 1:
        raise ValueError(f"has {' and '.join(given) or 'none'} of {', '.join(_KINDS)}; exactly one is wanted")
    (name,) = given
    value = row[name]
    if not value:
        raise ValueError(f"{name} is empty")
    if name == "prompt":
        if not isinstance(value, str):
            raise ValueError("prompt is no text")
        return value
    if not isinstance(value, list):
        raise ValueError(f"{name} is no list")
    if name == "prompt_token_ids":
        if not all(type(entry) is int and entry >= 0 for entry in value):
            raise ValueError("prompt_token_ids has something else than token ids")
        return tuple(value)
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError("messages has an entry without the texts role and content")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)
