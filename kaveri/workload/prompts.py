"""Reads files of prompts, and reports malformed lines. Needs no torch."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaveri.errors import ConfigError

KINDS = ("prompt", "messages", "prompt_token_ids")


class MalformedLine(ValueError):
    """Raised for a malformed line of a file; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """Prompt of a request: raw text, a conversation, or token ids."""

    kind: str
    """One of KINDS: raw text, a conversation, or token ids of the served model."""
    content: Any
    """A text, a list of {"role", "content"}, or a list of ids."""

    def as_json(self) -> dict[str, Any]:
        """Return the prompt under one key, as in a line of a .jsonl file and in keyword arguments of the client."""
        return {self.kind: self.content}

    @property
    def digest(self) -> bytes:
        """Hash of the prompt, equal on every machine. Also decides between training and held-out labels."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).digest()


def read_prompts(path: Path) -> list[tuple[int, RequestPrompt]]:
    """Read all prompts of a file, each with its line number, from 1. Blank lines are skipped.

    A .jsonl file has an object per line with one of "prompt", "messages" or "prompt_token_ids"; other keys are ignored.
    Any other file has a raw prompt per line. Raises ConfigError("--prompts") naming the line and the reason.
    """
    prompts = []
    for number, line in read_lines(path, "--prompts"):
        try:
            prompt = parse_prompt(parse_object(line)) if path.suffix == ".jsonl" else RequestPrompt("prompt", line)
        except MalformedLine as error:
            raise ConfigError("--prompts", f"{path}, line {number}: {error}") from error
        prompts.append((number, prompt))
    if not prompts:
        raise ConfigError("--prompts", f"{path} has no prompts")
    return prompts


def read_lines(path: Path, flag: str) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines of a UTF-8 file with their numbers, from 1. Raises ConfigError, naming `flag`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"{path} cannot be read: {error.strerror}") from error
    # Split as bytes: str.splitlines would also split at separators that a prompt may contain.
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ConfigError(flag, f"{path}, line {number}: is no UTF-8 from byte {error.start}") from error
        if text.strip():
            yield number, text


def parse_object(line: str) -> dict[str, Any]:
    """Parse a line that holds a JSON object. Raises MalformedLine."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedLine(f"is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise MalformedLine(f"is no JSON object but {line:.40}")
    return content


def parse_prompt(content: dict[str, Any]) -> RequestPrompt:
    """Extract the prompt from a line's JSON object. Raises MalformedLine."""
    given = [kind for kind in KINDS if kind in content]
    if len(given) != 1:
        raise MalformedLine(f"has {' and '.join(given) or 'none'} of {', '.join(KINDS)}; it must have one")
    kind = given[0]
    value = content[kind]
    if kind == "prompt":
        fits = isinstance(value, str) and value != ""
        wanted = "a text that is not empty"
    elif kind == "messages":
        fits = isinstance(value, list) and bool(value) and all(_is_message(entry) for entry in value)
        wanted = 'a list of {"role": text, "content": text}'
    else:
        # isinstance accepts bools as int.
        fits = isinstance(value, list) and bool(value) and all(type(entry) is int and entry >= 0 for entry in value)
        wanted = "a list of numbers of at least 0"
    if not fits:
        raise MalformedLine(f"{kind} is {value!r:.60}; it must be {wanted}")
    if kind == "messages":
        value = [{"role": entry["role"], "content": entry["content"]} for entry in value]
    return RequestPrompt(kind, value)


def _is_message(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("role"), str) and isinstance(entry.get("content"), str)
