"""How the KV cache of one model is partitioned over the ranks of an instance. Pure; moves nothing."""

from dataclasses import dataclass, replace

from kaveri.errors import InvalidArgument, LayoutMismatch
from kaveri.kv.layout import ELEMENT_BYTES, ORDERS, KvLayout


@dataclass(frozen=True, slots=True)
class KvPartition:
    """Layers split over pipeline stages, KV heads over tensor-parallel ranks; ranks are numbered stage by stage.

    rank = stage * tensor_ranks + tensor rank. With more tensor ranks than KV heads each head is on several ranks, as
    engines do it for grouped-query attention. Raises InvalidArgument when it does not come out even, LayoutMismatch
    when the order or the dtype of the layout is none that can be mapped.
    """

    layout: KvLayout
    """Of the whole model; every rank's blocks have its block_tokens and its order."""
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage, first stage first; together the layout's layer_count."""
    tensor_ranks: int = 1
    """Divides the layout's kv_head_count or is a multiple of it."""

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.order not in ORDERS:
            raise LayoutMismatch("order", layout.order, ORDERS)
        if layout.dtype not in ELEMENT_BYTES:
            raise LayoutMismatch("dtype", layout.dtype, tuple(ELEMENT_BYTES))
        if layout.first_layer or layout.first_kv_head:
            raise InvalidArgument("layout", (layout.first_layer, layout.first_kv_head), "of the whole model")
        if min(self.stage_layers, default=0) < 1 or sum(self.stage_layers) != layout.layer_count:
            limit = f"one number or more, each at least 1, together {layout.layer_count}"
            raise InvalidArgument("stage_layers", self.stage_layers, limit)
        heads, ranks = layout.kv_head_count, self.tensor_ranks
        if ranks < 1 or (heads % ranks and ranks % heads):
            raise InvalidArgument("tensor_ranks", ranks, f"a divisor or a multiple of {heads} KV heads")

    @classmethod
    def even(cls, layout: KvLayout, pipeline_stages: int = 1, tensor_ranks: int = 1) -> "KvPartition":
        """Layers spread as evenly as they go, the first stages taking one more; raises as the constructor does.

        >>> layout = KvLayout("model", 8, block_tokens=16, kv_head_count=4, head_dim=32, dtype="float16")
        >>> KvPartition.even(layout, pipeline_stages=3, tensor_ranks=2).stage_layers
        (3, 3, 2)
        """
        if not 1 <= pipeline_stages <= layout.layer_count:
            raise InvalidArgument("pipeline_stages", pipeline_stages, f"in [1, {layout.layer_count}]")
        least, more = divmod(layout.layer_count, pipeline_stages)
        return cls(layout, tuple(least + (stage < more) for stage in range(pipeline_stages)), tensor_ranks)

    @property
    def rank_count(self) -> int:
        """Ranks of the instance, each with a pool of its own."""
        return len(self.stage_layers) * self.tensor_ranks

    @property
    def replica_count(self) -> int:
        """Ranks of one stage that hold the same head."""
        return max(1, self.tensor_ranks // self.layout.kv_head_count)

    @property
    def head_bytes(self) -> int:
        """Bytes of the K, or the V, of one token and head: what is contiguous in every order."""
        return self.layout.head_dim * ELEMENT_BYTES[self.layout.dtype]

    def layers(self, rank: int) -> range:
        """The model's layers that a rank holds."""
        stage = self._require_rank(rank) // self.tensor_ranks
        first = sum(self.stage_layers[:stage])
        return range(first, first + self.stage_layers[stage])

    def heads(self, rank: int) -> range:
        """The model's KV heads that a rank holds."""
        heads = self.layout.kv_head_count
        first = self._require_rank(rank) % self.tensor_ranks * heads // self.tensor_ranks
        return range(first, first + max(1, heads // self.tensor_ranks))

    def rank_layout(self, rank: int) -> KvLayout:
        """The layout of a rank's pool."""
        return self.part_layout(self.layers(rank), self.heads(rank))

    def part_layout(self, layers: range, heads: range) -> KvLayout:
        """The layout of a pool for these layers and heads of the model alone."""
        return replace(
            self.layout,
            layer_count=len(layers),
            kv_head_count=len(heads),
            first_layer=layers.start,
            first_kv_head=heads.start,
        )

    def _require_rank(self, rank: int) -> int:
        if not 0 <= rank < self.rank_count:
            raise InvalidArgument("rank", rank, f"in [0, {self.rank_count})")
        return rank
