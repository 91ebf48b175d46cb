"""Closed forms that the planner's results are compared with: DéjàVu's (arXiv 2403.01876, appendix D and table 6;
letters as in kaveri.planner.pipeline_plan), and the M/D/1 queue of DistServe's section 3.1 (arXiv 2401.09670):
average TTFT for prompts of one length, Poisson arrivals, first come first served, and one prompt in a step."""


def token_machines(machines: int, prompt_s: float, token_s: float, new_tokens: float, streaming: float) -> float:
    """Equations 1 and 6: D_t = D N t / (m Y + N t), not rounded."""
    return machines * new_tokens * token_s / (streaming * prompt_s + new_tokens * token_s)


def colocated_inverse_throughput_s(machines: int, prompt_s: float, token_s: float, new_tokens: float) -> float:
    """Seconds per microbatch of one pipeline that runs both phases (equation 4)."""
    return (machines - 1) * (prompt_s - token_s) / machines + prompt_s + new_tokens * token_s


def apart_inverse_throughput_s(
    machines: int, prompt_depth: float, prompt_s: float, token_s: float, new_tokens: float, streaming: float
) -> float:
    """Seconds per microbatch of separate pipelines for prompts, `prompt_depth` machines, and tokens: appendix D's
    I_dis = max(I_p, I_t)."""
    prompts_s = streaming * machines * prompt_s / prompt_depth
    tokens_s = new_tokens * machines * token_s / (machines - prompt_depth)
    return max(prompts_s, tokens_s)


def average_ttft_inter_op_s(rate_per_s: float, service_s: float, stages: int = 2) -> float:
    """Equation 2, for any number of equal stages: D + R D_m^2 / (2 (1 - R D_m)), where D_m is D / stages.

    For two stages that is the paper's D + R D^2 / (4 (2 - R D)).
    """
    stage_s = service_s / stages
    return service_s + rate_per_s * stage_s**2 / (2 * (1 - rate_per_s * stage_s))
