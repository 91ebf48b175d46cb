"""Manifest of a predictor's folder: its content, and digests to detect changes. Needs no torch."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kaveri.errors import ConfigError

MANIFEST_FILE = "kaveri_predictor.json"
_FORMAT = 1
_VERSION_DIGITS = 16
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a trained predictor: served model, buckets of answer lengths, and files."""

    model: str
    """Served name of the model whose answers it was trained on."""
    vocab_size: int
    """Vocabulary size of the served model: token ids of prompts lie in [0, vocab_size)."""
    granularity: int
    """Tokens per bucket."""
    bucket_count: int
    longest_answer_tokens: int
    """Tokens of the longest answer among the labels; the last bucket includes that length."""
    max_prompt_tokens: int
    """Max prompt length; longer prompts are truncated."""
    own_tokenizer: bool
    """True if the classifier has its own tokenizer, so prompts must be tokenized again."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every other file, by its path in the folder."""

    @property
    def version(self) -> str:
        """Short digest of a predictor, which changes with weights, tokenizers and buckets."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_VERSION_DIGITS]


def write_manifest(folder: Path, manifest: Manifest, files: list[Path]) -> Manifest:
    """Complete the manifest with digests of `files`, write it to the folder, and return it."""
    digests = {str(path.relative_to(folder)): _digest(path) for path in sorted(files)}
    manifest = dataclasses.replace(manifest, files=digests)
    content = {"format": _FORMAT, "version": manifest.version, **dataclasses.asdict(manifest)}
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest and verify the digest of every file. Blocks: reads all weights. Raises
    ConfigError("predictor") for an invalid or missing manifest or file."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("predictor", f"{folder} holds no length predictor: {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("predictor", f"{path} is corrupt: {error}") from error
    manifest = _parse(path, content)
    for name, digest in manifest.files.items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise ConfigError("predictor", f"{folder / name} cannot be read: {error.strerror}") from error
        if found != digest:
            raise ConfigError("predictor", f"{folder / name} is corrupt: its SHA-256 is not the one in {path.name}")
    return manifest


def _parse(path: Path, content: Any) -> Manifest:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError("predictor", f"{path} is not of format {_FORMAT}")
    fields = {key: value for key, value in content.items() if key not in ("format", "version")}
    odd = ", ".join(sorted(set(fields) ^ {entry.name for entry in dataclasses.fields(Manifest)}))
    if odd:
        raise ConfigError("predictor", f"{path} is corrupt: fields missing or unknown: {odd}")
    for name, value in fields.items():
        wanted: type = {"model": str, "own_tokenizer": bool, "files": dict}.get(name, int)
        if type(value) is not wanted:
            raise ConfigError(
                "predictor", f"{path} is corrupt: {name} is {value!r:.40}; it must be of type {wanted.__name__}"
            )
        if isinstance(value, int) and value < 1 and name != "own_tokenizer":
            raise ConfigError("predictor", f"{path} is corrupt: {name} is {value}; it must be at least 1")
    manifest = Manifest(**fields)
    if content.get("version") != manifest.version:
        raise ConfigError("predictor", f"{path} is corrupt: its version does not fit its content")
    return manifest


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()
