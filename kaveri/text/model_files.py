"""Reads a model's configuration, and packs its tokenizer files into an archive for clients that tokenize."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import cached_file

from kaveri.domain.sampling import whole_number
from kaveri.models import resolve_model
from kaveri.text.generation_config import FoundGenerationConfig, parse_end_token_ids, read_generation_config

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Configuration values and tokenizer archive of one model."""

    generation: FoundGenerationConfig
    facts: Mapping[str, Any]
    """model_type, architectures, eos_token_ids, pad_token_id and bos_token_id; 0 for a missing id."""
    archive: bytes
    """The tokenizer's files as a zip file, the same bytes each time; empty if the model has none."""
    sha256: str
    """SHA-256 of the archive, hexadecimal."""


def read_model_files(model: str) -> ModelFiles:
    """Read the files of a model, given as a path, a hub id or a bundled name. Blocks."""
    source = resolve_model(model)
    whole = AutoConfig.from_pretrained(source)
    config = whole.get_text_config()
    generation = read_generation_config(source, whole)
    ends, _, _ = parse_end_token_ids(generation, whole, config.vocab_size)
    facts = {
        "model_type": whole.model_type,
        "architectures": whole.architectures or (),
        "eos_token_ids": sorted(ends),
        "pad_token_id": _known_id(config, "pad_token_id"),
        "bos_token_id": _known_id(config, "bos_token_id"),
    }
    archive = _archive(source)
    return ModelFiles(generation, facts, archive, hashlib.sha256(archive).hexdigest())


def _known_id(config: Any, name: str) -> int:
    token_id = whole_number(getattr(config, name, None))
    return token_id if token_id is not None and 0 <= token_id < config.vocab_size else 0


def _archive(source: str) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name in _TOKENIZER_FILES:
            path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
            if path is not None:
                # Omit the file's time, so that the archive is reproducible.
                archive.writestr(zipfile.ZipInfo(name), Path(path).read_bytes(), zipfile.ZIP_DEFLATED)
        is_empty = not archive.namelist()
    return b"" if is_empty else written.getvalue()
