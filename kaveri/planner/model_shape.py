"""The sizes of a model that determine its memory and its time. Pure."""

from dataclasses import dataclass

from kaveri.planner.bundled_table import read_entry

_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer whose weights and KV have two bytes a number."""

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
        """Numbers in the matrices of one layer: 4h^2 + 2hm with as many KV heads as heads."""
        hidden = self.hidden_size
        kv_size = hidden * self.kv_heads // self.heads
        return 2 * hidden * hidden + 2 * hidden * kv_size + self.ffn_matrices * hidden * self.ffn_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model's weights, without biases and norms."""
        embeddings = (self.vocab_size + self.max_model_len) * self.hidden_size
        return _NUMBER_BYTES * (self.layers * self.layer_weights + embeddings)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return _NUMBER_BYTES * 2 * self.layers * self.hidden_size * self.kv_heads // self.heads


def read_model_shape(name_or_file: str) -> ModelShape:
    """Read a bundled model by its name, or a TOML file with the same fields. Raises ConfigError."""
    return read_entry(name_or_file, "models", ModelShape, "--model")
