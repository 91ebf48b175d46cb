"""Identifies a checkpoint by its contents, so that instances of two different models never exchange KV."""

import json
from pathlib import Path

import xxhash

from kaveri.errors import ConfigError

_WHOLE_FILE_BYTES = 2**30
_SAMPLE_COUNT = 256
_SAMPLE_BYTES = 4096


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads from `folder`. Raises ConfigError when there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError("model", f"{index} is no index of safetensors files") from error
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError("model", f"{folder} holds no {file.name}; only safetensors weights are loaded")
    return files


def fingerprint(folder: Path) -> str:
    """Return 32 hexadecimal digits (xxh3_128) of the configuration and of the weight files' names, sizes and contents.

    A file above 1 GiB is read at its header and at 256 evenly spaced pages: two checkpoints of one shape that differ
    in a few values only, none of them sampled, would pass for one.
    """
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                while chunk := stream.read(2**22):
                    digest.update(chunk)
            else:
                header_bytes = int.from_bytes(stream.read(8), "little")
                digest.update(stream.read(min(header_bytes, _WHOLE_FILE_BYTES)))
                for sample in range(_SAMPLE_COUNT):
                    stream.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLE_COUNT - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
