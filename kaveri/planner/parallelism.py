"""Degrees of parallelism that an instance can have, and the KV capacity that each leaves. Pure."""

from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.planner.catalog import Hardware, ModelShape

USABLE_SHARE = 0.92
"""Share of a GPU's memory for weights and KV; the rest is for activations and the runtime. DistServe's own counts
(max_num_tokens.csv, LLMServe/DistServe at 82831f1) imply 0.915 to 0.924 on A100 80 GB."""


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """Degrees of tensor and pipeline parallelism of one instance."""

    tp: int
    """Tensor parallelism: GPUs that share each layer (DistServe's intra-op)."""
    pp: int
    """Pipeline parallelism: number of stages (DistServe's inter-op)."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp}, PP {self.pp}"


def kv_tokens(model: ModelShape, hardware: Hardware, parallelism: Parallelism) -> int:
    """Return the number of tokens whose KV fits next to the weights; below 1, the model does not fit."""
    usable = int(parallelism.gpus * hardware.memory_bytes * USABLE_SHARE) - model.weight_bytes
    return usable // model.kv_token_bytes


def parse_parallelism(text: str, field: str) -> Parallelism:
    """Parse "TP,PP", such as "2,1". Raises ConfigError, naming `field`."""
    try:
        tp, pp = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(field, f"is {text!r}; write TP,PP, such as 2,1") from None
    if tp < 1 or pp < 1:
        raise ConfigError(field, f"is {text}; TP and PP must be at least 1")
    return Parallelism(tp, pp)


def require_possible(
    model: ModelShape, hardware: Hardware, parallelism: Parallelism, gpus: int, field: str, *, has_pool: bool = False
) -> None:
    """Raise ConfigError for the setting `field` if the model cannot run so on `gpus` GPUs. has_pool: its KV fits."""
    reason = _impossible(model, hardware, parallelism, gpus, has_pool=has_pool)
    if reason:
        raise ConfigError(field, f"is {parallelism.tp},{parallelism.pp}: {reason}")


def possible_parallelisms(model: ModelShape, hardware: Hardware, gpus: int) -> tuple[Parallelism, ...]:
    """Return all parallelisms that fit: TP in one machine, both dividing the model (DistServe, algorithm 1)."""
    found = (
        Parallelism(tp, pp)
        for tp in range(1, min(hardware.gpus_per_node, gpus) + 1)
        for pp in range(1, gpus // tp + 1)
        if not _impossible(model, hardware, Parallelism(tp, pp), gpus)
    )
    return tuple(sorted(found, key=lambda one: (one.gpus, one.tp)))


def _impossible(
    model: ModelShape, hardware: Hardware, parallelism: Parallelism, gpus: int, *, has_pool: bool = False
) -> str:
    tp, pp = parallelism.tp, parallelism.pp
    if parallelism.gpus > gpus:
        return f"that takes {parallelism.gpus} GPUs; there are {gpus}"
    if tp > hardware.gpus_per_node:
        return f"TP stays within a machine, and {hardware.name} has {hardware.gpus_per_node} GPUs in one"
    if model.heads % tp or model.kv_heads % tp:
        return f"TP must divide the {model.heads} heads and {model.kv_heads} KV heads of {model.name}"
    if model.layers % pp:
        return f"PP must divide the {model.layers} layers of {model.name}"
    tokens = kv_tokens(model, hardware, parallelism)
    if tokens < model.max_model_len and not has_pool:
        left = f"room for {tokens} tokens of KV beside the weights" if tokens > 0 else "no room for the weights"
        return f"{parallelism.gpus} GPUs of {hardware.name} leave {left}; {model.max_model_len} tokens must fit"
    return ""
