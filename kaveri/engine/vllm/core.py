"""Drives vLLM's in-process engine step by step; the only module that accesses vLLM's internals. Not thread-safe: called
by the thread that constructs the engine, then by the engine thread alone."""

import contextlib
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.v1.engine import EngineCoreRequest

from kaveri.engine.vllm.connector import KaveriConnector
from kaveri.engine.vllm.connector_scheduler import SchedulerSide, transfer_params
from kaveri.engine.vllm.rank import Rank

_PROMPT, _DECODING = 0, 1
"""Priorities: when blocks run out, vLLM preempts the requests with the highest value."""


class StepOutput(NamedTuple):
    """Result of a step for one request, in vLLM's types. finish_reason: None while the answer continues."""

    engine_id: str
    token_ids: Sequence[int]
    logprobs: Any = None
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    """Tokens of a prompt that the prefix cache supplied. Known with its first token."""


class VllmCore:
    """A loaded vLLM engine (LLMEngine) in this process, with the KV connector. ranks: tensor-parallel, in order."""

    def __init__(
        self,
        llm: Any,
        ranks: Sequence[Rank],
        *,
        chunk_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        model: str,
    ) -> None:
        """model: the folder that vLLM has loaded."""
        self.model = model
        self.ranks = tuple(ranks)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._llm = llm
        # Number of requests so far. Makes their ids unique, and replaces their arrival times, by which vLLM orders
        # requests of one priority.
        self._count = 0
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._seat_count = self._scheduler.max_num_active_reqs
        self._chunk_tokens = chunk_tokens
        connector = self._scheduler.get_kv_connector()
        assert isinstance(connector, KaveriConnector), "vLLM runs without our connector"
        assert connector.scheduler_side is not None
        self.scheduler_side: SchedulerSide = connector.scheduler_side

    def add(self, engine_id: str, token_ids: Sequence[int], params: Any, *, is_prefill: bool) -> None:
        """Queue a request in vLLM. Prompts are computed in the order of these calls; their blocks are reserved, by
        preempting decoding requests if necessary. Raises vLLM's error if vLLM rejects it."""
        params.extra_args = {**(params.extra_args or {}), **transfer_params(engine_id)}
        if params.logprobs is not None or params.prompt_logprobs is not None:
            # Raises if the request wants more log-probabilities than vLLM's max_logprobs. All else is validated.
            params.verify(self._llm.model_config, None, None, None)
        self._count += 1
        # Like LLMEngine.add_request(), but without its validation, which repeats the engine's and doubles the time.
        request = EngineCoreRequest(
            request_id=f"{engine_id}-{self._count}",
            external_req_id=engine_id,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self._count),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=_PROMPT if is_prefill else _DECODING,
        )
        self._llm.output_processor.add_request(request, None)
        self._llm.engine_core.add_request(request)

    def begin_answer(self, request: Any, first_token_id: int | None) -> None:
        """Start to decode a request whose KV has arrived. first_token_id: its last token, whose KV the next step
        computes; None for a request resumed from a replica, whose tokens are all known. request: vLLM's record."""
        if first_token_id is not None:
            request.prompt_token_ids[-1] = request._all_token_ids[-1] = first_token_id
            # The hash of the block that this token completes.
            if request.block_hashes and request.num_tokens % self.ranks[0].layout.block_tokens == 0:
                request.block_hashes.pop()
        request.update_block_hashes()
        self._scheduler.finished_recving_kv_req_ids.add(request.request_id)

    def decode(self, request: Any) -> None:
        """Continue a computed prompt as a decoding request, which vLLM may preempt. request: vLLM's record."""
        request.priority = _DECODING

    def abort(self, vllm_id: str) -> None:
        """End a request; the connector decides if its blocks are kept. Ignores unknown ids."""
        self._llm.abort_request([vllm_id], internal=True)

    def step(self, batch_count: int, held: Collection[Any] = ()) -> list[StepOutput]:
        """Run one step of the scheduler and, if anything was scheduled, of the model.

        batch_count: size of the running batch; limits the tokens of the step to a chunk plus one per request, because
        prompts would use the unused rest of vLLM's own limit. held: vLLM's records of started requests that keep their
        blocks but are left out of this step.
        """
        scheduler = self._scheduler
        scheduler.max_num_scheduled_tokens = self._chunk_tokens + batch_count
        left_out = [request for request in scheduler.running if request in held]
        computed = [request for request in scheduler.running if request not in held]
        if scheduler.use_v2_model_runner:
            # vLLM keeps a slot for each held request.
            scheduler.max_num_active_reqs = self._seat_count - len(left_out)
        # Decoding requests precede prompts under way, which would take all tokens of the step.
        scheduler.running = sorted(computed, key=attrgetter("is_prefill_chunk"))
        try:
            outputs = self._llm.engine_core.get_output().outputs
        finally:
            scheduler.running = [*scheduler.running, *left_out]
        return self._processed(outputs)

    def _processed(self, outputs: Sequence[Any]) -> list[StepOutput]:
        """Convert the outputs of vLLM's core. Bypasses vLLM's output processor (8 us per token) for unfinished answers
        without log-probabilities."""
        processor = self._llm.output_processor
        found, others, cached_tokens = list[StepOutput](), list[Any](), dict[str, int]()
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if state is not None and output.prefill_stats is not None:
                cached_tokens[state.external_req_id] = output.prefill_stats.num_local_cached_tokens
            has_logprobs = output.new_logprobs is not None or output.new_prompt_logprobs_tensors is not None
            if state is None or output.finish_reason is not None or has_logprobs:
                others.append(output)
            else:
                cached = cached_tokens.get(state.external_req_id, 0)
                found.append(StepOutput(state.external_req_id, output.new_token_ids, cached_tokens=cached))
        for each in processor.process_outputs(others).request_outputs:
            (drawn,) = each.outputs
            answer = drawn.token_ids, drawn.logprobs, each.prompt_logprobs, drawn.finish_reason
            found.append(StepOutput(each.request_id, *answer, cached_tokens.get(each.request_id, 0)))
        return found

    def undrawable(self, request: Any) -> bool:
        """Return True if the request's last step produced NaN logits, so its token is meaningless. Counts infinite
        logits only if vLLM computes in float32 and samples the token. request: vLLM's record."""
        return bool(request.num_nans_in_logits)

    def holds(self, vllm_id: str) -> bool:
        """Return True if vLLM still has the request, even if only for its blocks."""
        return vllm_id in self._scheduler.requests

    def blocks_of(self, vllm_id: str) -> list[int]:
        """Return the ids of a request's blocks, in token order."""
        block_ids: list[int] = self._scheduler.kv_cache_manager.get_block_ids(vllm_id)[0]
        return block_ids

    @property
    def unfinished_count(self) -> int:
        """Number of running or waiting requests, including those whose KV has not arrived yet."""
        return sum(self._scheduler.get_request_counts())

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no request holds, including reusable blocks of the prefix cache."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def tables(self) -> dict[str, list[int]]:
        """Return the block ids of each request, by its id in vLLM."""
        return {
            vllm_id: self._scheduler.kv_cache_manager.get_block_ids(vllm_id)[0] for vllm_id in self._scheduler.requests
        }

    def reference_counts(self) -> dict[int, int]:
        """Return the number of requests that hold each block in use. Excludes the null block, which is never free."""
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        return {block.block_id: block.ref_cnt for block in blocks if block.ref_cnt and not block.is_null}

    def shutdown(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
        with contextlib.suppress(Exception):
            self._llm.engine_core.shutdown()
