"""Detects how a model's layers call their attention, and rejects models that paged attention cannot reproduce exactly.

Independent of the model's name: runs the model's own forward on two tokens, with an attention function that records its
calls (which also gives the KV's shape), and on a few with its own attention, with and without position ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kaveri.errors import ConfigError

_PROBE_NAME = "kaveri_probe"
_PROBE_TOKENS = 4
_ROUNDING = 8
"""Tolerance, in units of the dtype's epsilon times the largest logit."""
# Arguments of attention layers that either change nothing here or are honoured.
_KNOWN_ARGUMENTS = {
    "cache_position",
    "dropout",
    "is_causal",
    "kaveri_probe",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_value",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments that one layer passed to its attention function. strange: names of unsupported ones."""

    layer: int | None
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    masked: bool
    causal: bool
    window: int | None
    strange: tuple[str, ...]


@torch.inference_mode()
def probe_attention(name: str, model: Any, config: Any) -> list[AttentionCall]:
    """Run the model on two tokens; return each attention layer's call. Raises ConfigError if it cannot run packed."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError("model", f"{name} ({config.model_type}) does not take attention functions from outside")
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if layer_types:
        raise ConfigError("model", f"{name} has layers of {', '.join(sorted(layer_types))}; these are not served")
    # No mask function is registered under this name: transformers then makes no mask, and none is wanted.
    ALL_ATTENTION_FUNCTIONS.register(_PROBE_NAME, _note_call)
    model.set_attn_implementation(_PROBE_NAME)
    calls: list[AttentionCall] = []
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    keep = torch.tensor([1], device=model.device)
    try:
        output = model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, kaveri_probe=calls
        )
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError("model", f"{name} ({config.model_type}) does not run packed: {why[0]:.200}") from error
    if tuple(output.logits.shape[:2]) != (1, 1):
        raise ConfigError("model", f"{name} ({config.model_type}) does not choose the logits that it computes")
    return calls


@torch.inference_mode()
def require_plain_positions(name: str, model: Any, config: Any) -> None:
    """Raise ConfigError unless the model counts positions from 0, as packed steps do.

    Compares logits with explicit and default positions. RoBERTa's, for one, start at its padding token's id + 1.
    """
    model.set_attn_implementation("eager")
    padding = getattr(config, "pad_token_id", None)
    # Padding tokens have no position in some models.
    chosen = [token_id for token_id in range(_PROBE_TOKENS + 1) if token_id != padding][:_PROBE_TOKENS]
    tokens = torch.tensor([chosen], device=model.device) % config.vocab_size
    positions = torch.arange(tokens.shape[1], device=model.device).unsqueeze(0)
    try:
        by_default = model(input_ids=tokens, use_cache=False).logits.float()
        counted = model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError("model", f"{name} ({config.model_type}) does not take positions: {why[0]:.200}") from error
    # The two may round differently; other positions differ by far more.
    tolerance = _ROUNDING * torch.finfo(model.dtype).eps * float(by_default.nan_to_num().abs().max())
    if not torch.allclose(by_default, counted, rtol=0.0, atol=tolerance, equal_nan=True):
        raise ConfigError("model", f"{name} ({config.model_type}) does not count positions from 0; not served yet")


def require_paged(name: str, calls: Sequence[AttentionCall], config: Any, length: int) -> None:
    """Raise ConfigError unless paged attention equals the model's own attention, for up to `length` tokens."""
    if not calls or [call.layer for call in calls] != list(range(config.num_hidden_layers)):
        raise ConfigError("model", f"{name} has layers that are no attention layers, or calls them out of order")
    for call in calls:
        if call.key_shape != calls[0].key_shape or call.value_shape != call.key_shape:
            raise ConfigError("model", f"{name} has K and V of different shapes; these are not served")
        if call.query_shape[1] % call.key_shape[1] or call.query_shape[3] != call.key_shape[3]:
            raise ConfigError("model", f"{name} has query heads that do not share its K and V heads evenly")
        if call.masked or not call.causal:
            raise ConfigError("model", f"{name} has attention that is not plainly causal")
        if call.strange:
            raise ConfigError("model", f"{name} passes {', '.join(call.strange)} to its attention; not served yet")
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    if window is not None and windowed and window < length and all(call.window is None for call in calls):
        raise ConfigError(
            "max_model_len",
            f"is {length}; this model's sliding window of {window} is not passed to its attention, "
            f"so it is served up to {window}",
        )


def _note_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    probe: list[AttentionCall] | None = arguments.get("kaveri_probe")
    if probe is None:
        raise ConfigError("model", "its attention layers do not receive the arguments of the call")
    probe.append(
        AttentionCall(
            layer=getattr(module, "layer_idx", None),
            query_shape=tuple(query.shape),
            key_shape=tuple(key.shape),
            value_shape=tuple(value.shape),
            masked=attention_mask is not None,
            causal=arguments.get("is_causal", getattr(module, "is_causal", True)) is not False,
            window=arguments.get("sliding_window"),
            strange=tuple(
                sorted(
                    k for k, v in arguments.items() if k not in _KNOWN_ARGUMENTS and v is not None and v is not False
                )
            ),
        )
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
