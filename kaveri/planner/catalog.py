"""GPUs and models for plans: bundled, or read from files of the same form."""

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kaveri.errors import ConfigError

_FOLDER = Path(__file__).parent / "bundled"
_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A type of GPU, and the machines (nodes) that contain it."""

    name: str
    accelerator: str
    """Part of the name that the GPU reports, such as A100; profiles measured on other GPUs are refused."""
    memory_bytes: int
    gpus_per_node: int
    link_in_node: float
    """Bytes per second between two GPUs of one machine."""
    link_between_nodes: float
    """Bytes per second between two machines."""
    price_per_hour: float
    """Price of one GPU, in US dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder-only transformer with two bytes per weight and per KV element."""

    name: str
    layers: int
    hidden_size: int
    """h in DistServe's appendix A (arXiv 2401.09670)."""
    heads: int
    """n."""
    kv_heads: int
    ffn_size: int
    """m."""
    ffn_matrices: int = 2
    """Matrices in the feed-forward block of one layer: 3 if it is gated."""
    vocab_size: int
    max_model_len: int

    @property
    def layer_weights(self) -> int:
        """Weights in one layer's matrices: 4h^2 + 2hm if kv_heads equals heads (h: hidden_size, m: ffn_size)."""
        hidden = self.hidden_size
        kv_size = hidden * self.kv_heads // self.heads
        return 2 * hidden * hidden + 2 * hidden * kv_size + self.ffn_matrices * hidden * self.ffn_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights, without biases and norms."""
        embeddings = (self.vocab_size + self.max_model_len) * self.hidden_size
        return _NUMBER_BYTES * (self.layers * self.layer_weights + embeddings)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV cache per token: K and V of all layers of the whole model."""
        return _NUMBER_BYTES * 2 * self.layers * self.hidden_size * self.kv_heads // self.heads


EntryT = TypeVar("EntryT", Hardware, ModelShape)


def read_hardware(name_or_file: str) -> Hardware:
    """Read a bundled GPU type by its name, or a TOML file with the same fields. Raises ConfigError."""
    return _read_entry(name_or_file, "hardware", Hardware, "--hardware")


def read_model_shape(name_or_file: str) -> ModelShape:
    """Read a bundled model by its name, or a TOML file with the same fields. Raises ConfigError."""
    return _read_entry(name_or_file, "models", ModelShape, "--model")


def bundled_models() -> tuple[str, ...]:
    return tuple(_table("models"))


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text())


def _read_entry(name_or_file: str, table: str, kind: type[EntryT], field: str) -> EntryT:
    entries = _table(table)
    if name_or_file in entries:
        return _entry(name_or_file, entries[name_or_file], kind, field)
    path = Path(name_or_file).expanduser()
    if not name_or_file or not path.is_file():
        raise ConfigError(field, f"is {name_or_file!r}, which is no file and none of: {', '.join(entries)}")
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(field, f"cannot read {path}: {error}") from error
    return _entry(path.stem, document, kind, f"{field} {path}")


def _entry(name: str, document: dict[str, Any], kind: type[EntryT], where: str) -> EntryT:
    known = {entry.name: entry for entry in fields(kind) if entry.name != "name"}
    for key, value in document.items():
        if key not in known:
            raise ConfigError(f"{where} {key}", f"is no field; there are {', '.join(known)}")
        expected = known[key].type
        if expected in (str, "str"):
            if not isinstance(value, str):
                raise ConfigError(f"{where} {key}", f"is {value!r}; it must be a text")
            continue
        kinds = (int,) if expected in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise ConfigError(f"{where} {key}", f"is {value!r}; it must be a number above 0")
    for key, entry in known.items():
        if key not in document and entry.default is MISSING:
            raise ConfigError(f"{where} {key}", "is not given")
    return kind(name=name, **document)
