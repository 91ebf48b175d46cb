"""Draws tokens from logits: greedy, or by random numbers keyed by (seed, index of the draw, token id). Keeps no state.

A draw is a race (the Gumbel-max trick: Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014, section 2, in its
exponential form): every token of weight w waits Exponential(1) / w, and the first one is drawn, with probability
w / sum(w). A token's number depends on no other token's weight: when another batch shape rounds the logits differently,
the draw changes only if the two best tokens are within that rounding of each other. Inverse transform sampling would
shift every boundary between two tokens with the weights of all tokens before it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import torch
from torch import Tensor

from kaveri.domain.sampling import ALL_RULED_OUT, Logprobs
from kaveri.engine.stepwise.runner import NOT_FINITE, DrawnToken, NoToken, SequenceSlice
from kaveri.engine.stopping import barred_token_ids
from kaveri.engine.token_rules import LogitChanges, tokens_in
from kaveri.errors import EngineError
from kaveri.telemetry.logs import get_logger

_NO_EOS: frozenset[int] = frozenset()
_SCORED_TOGETHER = 64
"""Rows of logits converted to float32 at a time: 37 MiB with a vocabulary of 150,000."""
_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64. This and the factors are less 2**64, with the same bits: torch has int64 arithmetic only."""
_MIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
"""Rounds of SplitMix64's hash, as (shift, factor): value ^= value >> shift; value *= factor."""


def stream_state(seed: int, index: int) -> int:
    """Return the 64-bit random state of one draw: a function of seed and index, on every instance and in every batch.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 13): the
    seed's own hash is a state, and the draw's state is `index` gammas ahead of it.
    """
    state = _mix((seed + _GOLDEN_GAMMA) & _MASK_64)
    return _mix((state + (index + 1) * _GOLDEN_GAMMA) & _MASK_64)


def waiting_times(states: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return Exponential(1) numbers, one per token id, for each state: [len(states), vocab_size], float64, above 0.

    By SplitMix64: token id i uses the i-th number after the state, 52 random bits.
    """
    gammas = torch.arange(1, vocab_size + 1, device=device).mul_(_GOLDEN_GAMMA)
    signed = [state - (state >> 63 << 64) for state in states]
    bits = gammas + torch.tensor(signed, device=device).unsqueeze(1)
    # int64 wraps as uint64 does; only its right shift must not copy the sign.
    shifted = torch.empty_like(bits)
    for shift, factor in _MIX_ROUNDS:
        bits ^= torch.bitwise_right_shift(bits, shift, out=shifted).bitwise_and_(_MASK_64 >> shift)
        if factor != 1:
            bits *= factor
    uniform = bits.bitwise_right_shift_(12).bitwise_and_(_MASK_64 >> 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def _mix(value: int) -> int:
    for shift, factor in _MIX_ROUNDS:
        value = ((value ^ (value >> shift)) * factor) & _MASK_64
    return value


def draw_tokens(
    logits: Tensor, slices: Sequence[SequenceSlice], eos_token_ids: AbstractSet[int] = _NO_EOS
) -> list[DrawnToken | NoToken]:
    """Draw one token per row; NoToken if the row holds NaN, +inf or nothing but -inf (which masks a token).

    logits: [rows, vocabulary], any float dtype. slices: one per row, of which params, draw_index and rules are read. A
    row's token depends on its own logits, params, draw_index and rules alone. eos_token_ids: the model's; not drawn
    before min_tokens.

    If drawing raises, rows are drawn one by one, and those that raise get NoToken. If all of several rows raise, the
    cause is not in the rows, and the error is raised. A row whose rules fail gets NoToken and does not count as raised.
    """
    try:
        return _draw_together(logits, slices, eos_token_ids)
    except Exception as error:
        drawn, raised = list[DrawnToken | NoToken](), 0
        for row, piece in enumerate(slices):
            try:
                drawn += _draw_together(logits[row : row + 1], [piece], eos_token_ids)
            except Exception as row_error:
                drawn.append(NoToken(f"its draw raised {row_error!r}", is_final=True))
                raised += 1
        if raised == len(drawn) > 1:
            raise
        get_logger().warning("draw_failed", error=repr(error), rows=len(drawn))
        return drawn


def _draw_together(
    logits: Tensor, slices: Sequence[SequenceSlice], eos_token_ids: AbstractSet[int]
) -> list[DrawnToken | NoToken]:
    raw, failed = logits, dict[int, str]()
    if any(piece.rules is not None for piece in slices):
        logits, failed = _with_rules(logits, slices)
    if any(piece.draw_index < piece.params.min_tokens for piece in slices):
        logits = _without_barred(logits, slices, eos_token_ids)
    # Not argmax, which takes four times as long in bfloat16 on a CPU. The maximum of a row with NaN is NaN.
    largest = logits.max(-1)
    token_ids: list[int] = largest.indices.tolist()
    usable: list[bool] = largest.values.isfinite().tolist()
    # Sort only for requests that filter: it costs a lot, and no draw may depend on a neighbour's parameters.
    plain, filtered = list[int](), list[int]()
    for row, piece in enumerate(slices):
        if piece.params.temperature > 0:
            (filtered if piece.params.top_k > 0 or piece.params.top_p < 1 else plain).append(row)
    for rows in (plain, filtered):
        if rows:
            chosen = logits if len(rows) == len(slices) else logits[torch.tensor(rows, device=logits.device)]
            sampled = _sample(chosen, [slices[row] for row in rows], filters=rows is filtered)
            for row, token_id in zip(rows, sampled, strict=True):
                token_ids[row] = token_id
    logprobs = dict[int, Logprobs]()
    if any(piece.params.logprobs is not None for piece in slices):
        logprobs = _logprobs(raw, slices, token_ids)
    drawn: list[DrawnToken | NoToken] = [
        DrawnToken(token_id, logprobs.get(row)) if usable[row] else _no_token(raw[row], slices[row])
        for row, token_id in enumerate(token_ids)
    ]
    for row, reason in failed.items():
        drawn[row] = NoToken(reason, is_final=True, by_rules=True)
    return drawn


def _no_token(raw: Tensor, piece: SequenceSlice) -> NoToken:
    if piece.rules is not None and raw.max().isfinite():
        return NoToken(ALL_RULED_OUT, is_final=True, by_rules=True)
    return NoToken(NOT_FINITE)


def _with_rules(logits: Tensor, slices: Sequence[SequenceSlice]) -> tuple[Tensor, dict[int, str]]:
    """Return a float32 copy of the logits, changed as the slices' rules say (LogitChanges.apply), and the rows whose
    rules failed, with the reasons."""
    logits, failed = logits.to(torch.float32, copy=True), dict[int, str]()
    found: list[tuple[int, LogitChanges]] = []
    for row, piece in enumerate(slices):
        if piece.rules is not None:
            try:
                found.append((row, piece.rules.changes(piece.draw_index)))
            except EngineError as error:
                failed[row] = error.reason
    count = [len(changes.token_ids) for _, changes in found]
    if any(count):
        rows = np.repeat([row for row, _ in found], count)
        places = rows, np.concatenate([changes.token_ids for _, changes in found])
        values = np.concatenate([changes.values for _, changes in found], axis=1)
        at = tuple(torch.from_numpy(each).to(logits.device) for each in places)
        bias, repetition, frequency, presence = torch.from_numpy(values).to(logits.device)
        changed = logits[at] + bias
        changed = torch.where(changed > 0, changed / repetition, changed * repetition)
        logits[at] = changed - frequency - presence
    for row, changes in found:
        if changes.barred_ids:
            logits[row, torch.tensor(changes.barred_ids, device=logits.device)] = -torch.inf
    allowed = {row: changes.allowed for row, changes in found if changes.allowed is not None}
    if allowed:
        masked = torch.from_numpy(tokens_in(~np.stack([*allowed.values()]), logits.shape[1])).to(logits.device)
        at_rows = slice(None) if len(allowed) == len(slices) else torch.tensor([*allowed], device=logits.device)
        logits[at_rows] = logits[at_rows].masked_fill_(masked, -torch.inf)
    return logits, failed


def _without_barred(logits: Tensor, slices: Sequence[SequenceSlice], eos_token_ids: AbstractSet[int]) -> Tensor:
    """Return logits (a copy if changed) with -inf for tokens that would end an answer before its min_tokens."""
    # With a grammar, TokenRules decides where the answer may end.
    pairs = [
        (row, token_id)
        for row, piece in enumerate(slices)
        if piece.params.grammar is None
        for token_id in barred_token_ids(piece.params, eos_token_ids, piece.draw_index)
    ]
    if not pairs:
        return logits
    rows, columns = torch.tensor(pairs, device=logits.device).unbind(1)
    return logits.index_put((rows, columns), logits.new_tensor(-torch.inf))


def _sample(logits: Tensor, slices: Sequence[SequenceSlice], *, filters: bool) -> list[int]:
    """Sample a token for each row from the whole vocabulary or, with `filters`, from the smallest set of the top_k
    likeliest tokens whose weight reaches top_p; without those below min_p."""
    device, vocab_size = logits.device, logits.shape[-1]
    # Probabilities after temperature, up to a factor; the likeliest token's is 1. The maximum goes first, so that a
    # tiny temperature makes -inf of the others and not inf - inf.
    weights = logits.double()
    weights -= weights.max(-1, keepdim=True).values
    temperatures = [[piece.params.temperature] for piece in slices]
    weights.div_(torch.tensor(temperatures, dtype=torch.float64, device=device)).exp_()
    states = [stream_state(piece.params.seed or 0, piece.draw_index) for piece in slices]
    waits = waiting_times(states, vocab_size, device)
    if not filters:
        return (_without_unlikely(weights, slices) / waits).argmax(-1).tolist()
    weights, order = weights.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(vocab_size, device=device)
    top_k = torch.tensor([[piece.params.top_k or vocab_size] for piece in slices], device=device)
    weights.masked_fill_(rank >= top_k, 0)
    before = weights.cumsum(-1) - weights
    # A token stays while those before it have not reached top_p (Holtzman et al. 2020, section 3.1). The first stays.
    top_p = torch.tensor([[piece.params.top_p] for piece in slices], dtype=torch.float64, device=device)
    weights.masked_fill_((before >= top_p * weights.sum(-1, keepdim=True)) & (rank > 0), 0)
    weights = _without_unlikely(weights, slices)
    first = (weights / waits.gather(-1, order)).argmax(-1, keepdim=True)
    return order.gather(-1, first).squeeze(1).tolist()


def _without_unlikely(weights: Tensor, slices: Sequence[SequenceSlice]) -> Tensor:
    """Return weights, changed in place, with 0 for those below min_p, where the likeliest token's is 1 (Nguyen et al.,
    "Turning Up the Heat: Min-p Sampling", ICLR 2025, section 3). After top_p, as in transformers."""
    min_p = [[piece.params.min_p] for piece in slices]
    if any(least > 0 for (least,) in min_p):
        weights.masked_fill_(weights < torch.tensor(min_p, dtype=torch.float64, device=weights.device), 0)
    return weights


def score_tokens(logits: Tensor, token_ids: Sequence[int], count: int) -> tuple[Logprobs, ...]:
    """Return the log-probability of each given token, with the `count` likeliest alternatives at its position.

    logits: [rows, vocabulary], any float dtype; one row per token. Computed in float32.
    """
    entries: list[Logprobs] = []
    for first in range(0, len(token_ids), _SCORED_TOGETHER):
        ids = token_ids[first : first + _SCORED_TOGETHER]
        entries += _report(logits[first : first + len(ids)], ids, [count] * len(ids))
    return tuple(entries)


def _logprobs(logits: Tensor, slices: Sequence[SequenceSlice], token_ids: Sequence[int]) -> dict[int, Logprobs]:
    counts = {row: piece.params.logprobs for row, piece in enumerate(slices) if piece.params.logprobs is not None}
    chosen = logits[torch.tensor(list(counts), device=logits.device)]
    entries = _report(chosen, [token_ids[row] for row in counts], list(counts.values()))
    return dict(zip(counts, entries, strict=True))


def _report(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Return log-probabilities for each row, in float32 from logits before temperature, top_k and top_p."""
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    every = torch.log_softmax(logits.float(), -1)
    values = every.gather(-1, chosen).squeeze(1).tolist()
    likeliest = every.topk(min(max(counts), logits.shape[-1]), -1)
    top_values, top_ids = likeliest.values.tolist(), likeliest.indices.tolist()
    return [
        Logprobs(values[row], tuple(zip(top_ids[row][:count], top_values[row][:count], strict=True)))
        for row, count in enumerate(counts)
    ]
