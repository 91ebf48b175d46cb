"""DéjàVu's division of machines between a prompt pipeline and a token pipeline (arXiv 2403.01876). Pure.

Equation 1 is section 4.2.1's; 2 to 7 are appendix D's. Letters are the paper's:

    D  machines     L  layers           Y  seconds of a prompt in a stage of a pipeline of D machines
    N  new tokens   m  cost of streaming the prompt's KV, at least 1        t  seconds of a token in such a stage
    M  bytes of GPU memory of a machine   W  bytes of a layer's weights   C, K  of a layer's KV of prompt, of tokens
"""

import math

from kaveri.errors import ConfigError


def least_prompt_depth(layers: int, prompt_kv_bytes: float, weight_bytes: float, memory_bytes: float) -> int:
    """Equation 2: the fewest machines whose memory holds the prompt pipeline. Sizes are those of one layer."""
    return math.ceil(layers * (prompt_kv_bytes + weight_bytes) / memory_bytes)


def least_token_depth(
    layers: int, prompt_kv_bytes: float, token_kv_bytes: float, weight_bytes: float, memory_bytes: float
) -> int:
    """Equation 3, in whole machines: the fewest that hold the token pipeline, with as many microbatches as stages.

    Raises ConfigError when the KV of one microbatch in all layers leaves no room for weights: then no depth suffices.
    """
    left_bytes = memory_bytes - layers * (prompt_kv_bytes + token_kv_bytes)
    if left_bytes <= 0:
        kv_gb = layers * (prompt_kv_bytes + token_kv_bytes) / 1e9
        reason = f"has {kv_gb:.4g} GB of KV; a machine has {memory_bytes / 1e9:.4g} GB, and no depth helps"
        raise ConfigError("--microbatch", reason)
    return math.ceil(layers * weight_bytes / left_bytes)


def prompt_machines(machines: int, prompt_s: float, token_s: float, new_tokens: float, streaming: float) -> float:
    """Equations 1 and 7: D_p = D m Y / (m Y + N t), not rounded."""
    return machines * streaming * prompt_s / (streaming * prompt_s + new_tokens * token_s)


def streaming_bound(machines: int) -> float:
    """Equation 5 holds for m below 2 - 1/D. The paper says m below 2; from this bound on its denominator is not above
    0, and two pipelines are slower than one for any Y / t."""
    return 2 - 1 / machines


def apart_pays(machines: int, prompt_s: float, token_s: float, streaming: float) -> bool:
    """Equation 5: Y / t > (D - 1) / (D (2 - m) - 1), for a division of machines without rounding.

    Raises ConfigError for an m outside [1, streaming_bound()).
    """
    if not 1 <= streaming < streaming_bound(machines):
        limit = f"at least 1 and below 2 - 1/D = {streaming_bound(machines):.4g}, where equation 5 holds"
        raise ConfigError("--streaming", f"is {streaming:g}; it must be {limit}")
    return prompt_s / token_s > (machines - 1) / (machines * (2 - streaming) - 1)
