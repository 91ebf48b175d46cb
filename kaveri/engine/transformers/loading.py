"""Loads a model of transformers and makes a runner of it, or explains in one line why it cannot be served."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from kaveri.engine.checkpoint import (
    auto_dtype,
    fingerprint,
    quantization_method,
    read_config_json,
    refusal,
    stored_dtype,
    weight_files,
)
from kaveri.engine.limits import require_model_len
from kaveri.engine.onednn import limit_primitive_cache
from kaveri.engine.transformers.attention import ATTENTION_NAME, TORCH_DTYPES, paged_attention
from kaveri.engine.transformers.cpu_layers import pack_linears, replace_rms_norms, watched_linears
from kaveri.engine.transformers.probe import probe_attention, require_paged, require_plain_positions
from kaveri.engine.transformers.runner import TransformersRunner
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.models import resolve_model
from kaveri.text.generation_config import end_token_ids, read_generation_config

_HUB_TIMEOUT_S = 5.0


def load_runner(
    model: str, dtype: str, device: str, max_model_len: int | None, block_tokens: int
) -> TransformersRunner:
    """Load a model and return its runner; takes seconds, plus the download of a new hub id. Raises ConfigError.

    model: a folder, a hub id or a bundled name. dtype: "auto" (see auto_dtype()), "float32", "bfloat16" or "float16".
    device: "auto", "cpu" or "cuda[:index]". max_model_len: None for as many positions as the model was made for.
    """
    if block_tokens < 1:
        raise ConfigError("block_tokens", f"is {block_tokens}; it must be at least 1")
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        raise ConfigError("dtype", f"is {dtype!r}; choose auto, {', '.join(TORCH_DTYPES)}")
    target = _torch_device(device)
    folder = local_folder(resolve_model(model))
    limit_primitive_cache()
    values = read_config_json(folder)
    loaded = _load(folder, values, _loaded_dtype(dtype, values, target.type == "cpu"))
    try:
        loaded = loaded.to(target)
    except torch.OutOfMemoryError as error:
        raise ConfigError("model", f"{model} does not fit into the free memory of {target}") from error
    dtype_name = next((name for name, known in TORCH_DTYPES.items() if known == loaded.dtype), None)
    if dtype_name is None:
        raise ConfigError("dtype", f"{model} is stored as {loaded.dtype}; choose one of {', '.join(TORCH_DTYPES)}")
    config = loaded.config.get_text_config()
    length = _model_length(config, max_model_len)
    with watched_linears(loaded) as linear_calls:
        calls = probe_attention(model, loaded, config)
    require_paged(model, calls, config, length)
    require_plain_positions(model, loaded, config)
    pack_linears(loaded, linear_calls)
    replace_rms_norms(loaded)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
    loaded.set_attn_implementation(ATTENTION_NAME)
    layout = KvLayout(
        model_fingerprint=fingerprint(folder),
        layer_count=len(calls),
        block_tokens=block_tokens,
        kv_head_count=calls[0].key_shape[1],
        head_dim=calls[0].key_shape[3],
        dtype=dtype_name,
    )
    end_ids = end_token_ids(read_generation_config(folder, loaded.config), loaded.config, config.vocab_size)
    return TransformersRunner(loaded, layout, length, config.vocab_size, end_ids)


def _torch_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", f"is {device!r}; choose auto, cpu or cuda") from error
    if target.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"is {device!r}; choose auto, cpu or cuda")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", f"is {device!r}, but this build of torch finds no GPU here")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", f"is {device!r}; the last GPU here is cuda:{torch.cuda.device_count() - 1}")
    return target


def local_folder(model: str) -> Path:
    """Return the folder with the model's files; downloads them if `model` is an uncached hub id. Raises ConfigError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError("model", f"{model} holds no config.json")
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError("model", f"{model} is no folder")
    return _hub_folder(model)


def _hub_folder(model: str) -> Path:
    # Not at the top: only models from the hub need it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=True))
    except HFValidationError as error:
        raise ConfigError("model", f"{model!r:.120} is neither a folder nor a hub id") from error
    except LocalEntryNotFoundError:
        pass  # not cached yet
    try:
        # One quick question first: the download itself retries for minutes where there is no network.
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
        return Path(snapshot_download(model, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # the hub's client lets errors through of whichever HTTP library it is built on
        reason = str(error).strip().splitlines()
        why = reason[0] if reason else type(error).__name__
        raise ConfigError("model", f"{model} is no folder here and cannot be had from the hub: {why:.200}") from error


def _loaded_dtype(dtype: str, values: Mapping[str, Any], on_cpu: bool) -> Any:
    """Return the dtype for from_pretrained(). With "auto", quantized checkpoints keep the stored type."""
    if dtype != "auto":
        return TORCH_DTYPES[dtype]
    stored = stored_dtype(values)
    if stored is None or quantization_method(values) is not None:
        return "auto"
    return TORCH_DTYPES.get(auto_dtype(stored, on_cpu), "auto")


def _load(folder: Path, values: Mapping[str, Any], dtype: Any) -> Any:
    logging.disable_progress_bar()
    weight_files(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.is_encoder_decoder:
            raise ConfigError("model", f"{folder} is an encoder-decoder; only decoder-only models are served")
        # Read by from_pretrained too, whose error would not name the file.
        read_generation_config(folder, config)
        model, findings = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            # Refused below: its own error refers to a report in the log.
            ignore_mismatched_sizes=True,
        )
    except ConfigError:
        raise
    except Exception as error:  # any class: for a configuration's values, for a kernel's missing package
        raise refusal(folder, values, error, "transformers") from error
    if findings["mismatched_keys"]:
        name, stored, expected = sorted(findings["mismatched_keys"])[0]
        reason = f"{folder} holds {name} in the shape {list(stored)}; config.json makes it {list(expected)}"
        raise ConfigError("model", reason)
    if findings["missing_keys"]:
        missing = sorted(findings["missing_keys"])
        raise ConfigError("model", f"{folder} lacks {len(missing)} of its weights, {missing[0]} for one")
    return model.eval().requires_grad_(False)


def _model_length(config: Any, wanted: int | None) -> int:
    positions: int | None = getattr(config, "max_position_embeddings", None)
    length = wanted if wanted is not None else positions
    if length is None:
        raise ConfigError("max_model_len", "the model states no length of its own; give one")
    require_model_len(length)
    if positions is not None and length > positions:
        raise ConfigError("max_model_len", f"is {length}; the model was made for {positions} positions")
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # These switch frequencies by the longest sequence in the batch: KV would depend on its neighbours.
        if entry.get("rope_type") in ("dynamic", "longrope"):
            limit = entry.get("original_max_position_embeddings") or positions
            if limit is not None and length > limit:
                raise ConfigError(
                    "max_model_len",
                    f"is {length}; with {entry['rope_type']} rotary embeddings this model is served up to {limit}",
                )
    return length
