"""Closed forms that the planner's results are compared with: DéjàVu's (arXiv 2403.01876, appendix D and table 6;
letters as in kaveri.planner.pipeline_plan), and the M/D/1 queue of DistServe's section 3.1 (arXiv 2401.09670): prompts
of one length, Poisson arrivals, first come first served, one prompt per step."""


def token_machines(machines: int, prompt_s: float, token_s: float, new_tokens: float, streaming: float) -> float:
    """Unrounded number of machines for tokens: D_t = D N t / (m Y + N t) (equations 1 and 6)."""
    return machines * new_tokens * token_s / (streaming * prompt_s + new_tokens * token_s)


def colocated_inverse_throughput_s(machines: int, prompt_s: float, token_s: float, new_tokens: float) -> float:
    """Seconds per microbatch of one pipeline for prompts and tokens (equation 4)."""
    return (machines - 1) * (prompt_s - token_s) / machines + prompt_s + new_tokens * token_s


def apart_inverse_throughput_s(
    machines: int, prompt_depth: float, prompt_s: float, token_s: float, new_tokens: float, streaming: float
) -> float:
    """Seconds per microbatch of separate prompt and token pipelines: I_dis = max(I_p, I_t) (appendix D)."""
    prompts_s = streaming * machines * prompt_s / prompt_depth
    tokens_s = new_tokens * machines * token_s / (machines - prompt_depth)
    return max(prompts_s, tokens_s)


def average_ttft_inter_op_s(rate_per_s: float, service_s: float, stages: int = 2) -> float:
    """Average TTFT with `stages` equal stages (equation 2): D + R D_m^2 / (2 (1 - R D_m)), D_m = D / stages."""
    stage_s = service_s / stages
    return service_s + rate_per_s * stage_s**2 / (2 * (1 - rate_per_s * stage_s))
