"""Batching rules of other serving systems, for comparison. Pure.

    prefill-first  vLLM 0.2 (arXiv 2309.06180): a step takes whole prompts while some wait and fit, else it decodes
    token-budget   Sarathi (arXiv 2308.16369), DeepSpeed-MII: decode tokens first, then chunks of prompts up to a budget
    whole-batch    FasterTransformer: a batch runs to its end before the next begins, its prompts padded to the longest
    beside         chunks of prompts next to the whole decode batch, as in colocated instances of Kaveri

Splitwise (arXiv 2311.18677) is a cluster of prefill and decode instances that takes the least loaded of each:
kaveri.simulator.simulate does that. Pipelines of FasterTransformer are in kaveri.planner.pipeline_rate.
"""

import enum


class BaselineRule(enum.StrEnum):
    """Batching rule: the prompts and decodes that a scheduler puts into each engine step."""

    PREFILL_FIRST = "prefill-first"
    TOKEN_BUDGET = "token-budget"
    WHOLE_BATCH = "whole-batch"
    BESIDE = "beside"
