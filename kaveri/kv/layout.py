"""What a block of KV cache looks like, and when two pools may exchange blocks byte by byte. Pure."""

from dataclasses import dataclass, fields

from kaveri.errors import LayoutMismatch

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of a pool: `layer_count` layers of blocks, each block [2, block_tokens, kv_head_count, head_dim]."""

    model_fingerprint: str
    """Equal only for the same weights and shape."""
    layer_count: int
    block_tokens: int
    kv_head_count: int
    head_dim: int
    dtype: str
    """A key of ELEMENT_BYTES."""
    order: str = "2NHD"
    """Order of the bytes in a block: K then V, token, head, element."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return 2 * self.block_tokens * self.kv_head_count * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.layer_count * self.block_bytes // self.block_tokens

    def block_count(self, token_count: int) -> int:
        """Blocks that hold `token_count` tokens; the last one may be part full."""
        return -(-token_count // self.block_tokens)

    def require_same(self, other: "KvLayout") -> None:
        """Raises LayoutMismatch, naming the first field that differs."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                raise LayoutMismatch(field.name, ours, theirs)
