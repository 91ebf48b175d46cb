"""An engine instance as a worker of the field's gRPC, for gateways that choose prefill and decode instances themselves.

A prefill leg answers the prompt's first token and says where its KV is held; a decode leg has it pushed, and answers.
Imported with --vllm-grpc only, for the package of the messages is an extra.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from grpc import aio
from smg_grpc_proto import vllm_engine_pb2

from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, ResolvedParams, derived_seed
from kaveri.domain.view import InstanceState, Phase
from kaveri.engine.contract import EngineInfo
from kaveri.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KaveriError,
    RequestAlreadyExists,
    RequestCancelled,
    SlowReader,
    Unavailable,
    Unsupported,
)
from kaveri.hosting.engine_host import EngineHost
from kaveri.hosting.read_limit import ReadLimit
from kaveri.hosting.served_phases import ServedPhases
from kaveri.hosting.vllm_grpc import SERVICE_NAME as SERVICE_NAME
from kaveri.hosting.vllm_grpc import (
    AnswerMessages,
    VllmAsked,
    model_info,
    read_abort,
    read_generate,
    register,
    renamed,
    scheduler_load,
    tokenizer_chunks,
)
from kaveri.telemetry.logs import get_logger
from kaveri.text.generation_config import parse_defaults
from kaveri.text.model_files import ModelFiles, read_model_files
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.wire.messages import logprobs_to_proto
from kaveri.wire.status import abort, status_of
from services.instance.config import PhasesConfig
from services.instance.decode_leg import DecodeLegs, LegRequest, first_token
from services.instance.hold_params import CONNECTOR, FIELD, HoldAt, HoldWanted, read_hold, write_hold
from services.instance.leg_metrics import LegMetrics
from services.instance.stop_texts import StopTexts
from services.prefill.holds import Holds
from services.prefill.requests import Destination
from services.prefill.role import LONGEST_REQUEST_S, PrefillRole

LegContext = aio.ServicerContext[Any, Any]
_NO_DEADLINE_S = 600.0
"""Given to a call without a deadline."""


@dataclass(eq=False, slots=True)
class _LegCall:
    """One Generate."""

    asked: VllmAsked
    context: LegContext
    limit: ReadLimit
    deadline_s: float
    scope: asyncio.Timeout
    """Ends the call: at its deadline, or when it is aborted."""
    is_aborted: bool = False
    completed: set[int] = field(default_factory=set)
    """Indexes of the answers that have had their last message."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a message is written."""

    async def write(self, message: Any) -> None:
        async with self.turn:
            if message.HasField("complete"):
                self.completed.add(message.complete.index)
            self.limit.begin()
            await self.context.write(message)
            self.limit.end()

    def abort(self) -> None:
        if self.scope.expired():
            # It ends already.
            return
        self.is_aborted = True
        self.scope.reschedule(asyncio.get_running_loop().time())


class LegParts:
    """The parts of an instance that serve legs."""

    def __init__(
        self,
        config: PhasesConfig,
        info: EngineInfo,
        phases: ServedPhases,
        prefill: PrefillRole,
        holds: Holds,
        legs: DecodeLegs,
        metrics: LegMetrics,
        tokenizer: ModelTokenizer | None,
    ) -> None:
        """tokenizer: None: it is loaded when the first text comes."""
        self.config = config
        self.info = info
        self.phases = phases
        self.prefill = prefill
        self.holds = holds
        self.legs = legs
        self.metrics = metrics
        self.tokenizer = tokenizer


class VllmLegServicer:
    """What this class has no method for is UNIMPLEMENTED. For one event loop."""

    def __init__(self, parts: LegParts, host: Callable[[], EngineHost]) -> None:
        """host: around the parts."""
        self._parts = parts
        self._host = host
        self._calls: dict[str, _LegCall] = {}
        """By request id."""
        self._started_s = time.monotonic()
        self._files: ModelFiles | None = None
        self._tokenizer = parts.tokenizer
        self._reading = asyncio.Lock()

    def register(self, server: aio.Server) -> None:
        """Adds what is built of the service to a server that has not started."""
        register(self, server)

    # A coroutine that writes, not a generator: cancellation then always arrives inside it.
    async def Generate(self, request: Any, context: LegContext) -> None:  # noqa: N802
        leg, outcome = "decode", "gone"
        is_text = request.WhichOneof("input") == "text"
        try:
            asked = read_generate(request, is_leg=True)
            hold = read_hold(asked.kv_transfer)
            asked = replace(asked, request_id=asked.request_id or f"leg-{secrets.token_hex(8)}")
            if self._is_prefill_leg(hold, asked):
                leg = "prefill"
            outcome = await self._generate(asked, hold, leg, context)
        except SlowReader as error:
            outcome = "slow_reader"
            get_logger().warning("client_too_slow", request_id=request.request_id[:128], slow_reader_s=error.limit_s)
            await abort(context, error)
        except KaveriError as error:
            outcome = status_of(error)[0].name.lower()
            await abort(context, renamed(error, is_text))
        finally:
            self._parts.metrics.requests.labels(leg, outcome).inc()

    def _is_prefill_leg(self, hold: HoldWanted | HoldAt | None, asked: VllmAsked) -> bool:
        """Raises InvalidArgument and Unavailable when no phase that is served here can answer."""
        phases = self._parts.phases
        prefills, decodes = phases.is_ordered(Phase.PREFILL), phases.is_ordered(Phase.DECODE)
        if isinstance(hold, HoldWanted):
            if not prefills:
                raise InvalidArgument(f"{FIELD}.do_remote_decode", True, "left out: this instance does not prefill")
            return True
        if decodes:
            return False
        if not prefills:
            raise Unavailable("this instance serves no phase now", retry_after_s=1.0)
        if hold is not None:
            raise InvalidArgument(f"{FIELD}.do_remote_prefill", True, "left out: this instance does not decode")
        if asked.params.max_tokens != 1:
            limit = "1: this instance computes prompts, and does not decode"
            raise InvalidArgument("sampling_params.max_tokens", asked.params.max_tokens, limit)
        return True

    async def _generate(self, asked: VllmAsked, hold: HoldWanted | HoldAt | None, leg: str, context: LegContext) -> str:
        """Returns the outcome for the metrics."""
        if asked.request_id in self._calls:
            raise RequestAlreadyExists(asked.request_id)
        left_s = context.time_remaining()
        left_s = _NO_DEADLINE_S if left_s is None else min(left_s, LONGEST_REQUEST_S)
        deadline_s = time.monotonic() + left_s
        async with ReadLimit(self._parts.config.slow_reader_s) as limit:
            call = None
            try:
                async with asyncio.timeout(left_s) as scope:
                    call = self._calls[asked.request_id] = _LegCall(asked, context, limit, deadline_s, scope)
                    token_ids = await self._prompt(asked, deadline_s)
                    if leg == "prefill":
                        return await self._prefill(call, token_ids, isinstance(hold, HoldWanted))
                    assert not isinstance(hold, HoldWanted)
                    return await self._decode(call, token_ids, hold)
            except TimeoutError as error:
                assert call is not None
                if not call.is_aborted:
                    raise DeadlineExceeded from error
            except RequestCancelled:
                # The caller has given up the other leg.
                assert call is not None
            finally:
                if call is not None:
                    del self._calls[asked.request_id]
            for index in sorted(set(range(asked.n)) - call.completed):
                await call.write(AnswerMessages(asked, index).complete(FinishReason.CANCELLED))
            return "abort"

    async def _prefill(self, call: _LegCall, token_ids: tuple[int, ...], is_held: bool) -> str:
        asked, parts = call.asked, self._parts
        if asked.n != 1:
            raise InvalidArgument("sampling_params.n", asked.n, "1 on a prefill leg")
        if asked.params.max_tokens != 1:
            raise InvalidArgument("sampling_params.max_tokens", asked.params.max_tokens, "1 on a prefill leg")
        # With a second token to come the engine keeps the KV when it has drawn the first one.
        has_second = is_held and len(token_ids) + 2 <= parts.info.max_model_len
        params = self._completed(replace(asked.params, max_tokens=2) if has_second else asked.params, len(token_ids))
        ownership = Ownership(Owner(0, 1), f"leg-{secrets.token_hex(16)}")
        messages = AnswerMessages(asked, 0)
        destination = Destination.HOLD if is_held else Destination.DECODE
        request = None
        try:
            async with parts.holds.claimed(len(token_ids)) if is_held else contextlib.nullcontext():
                request = parts.prefill.accept(
                    asked.request_id, ownership, token_ids, 0, params, None, destination=destination
                )
                first = await first_token(request)
                name = parts.holds.name_of(request)
            logprobs = [logprobs_to_proto(first.logprobs)] if first.logprobs is not None else []
            part = messages.part([first.token_id], logprobs, len(token_ids))
            if part is not None:
                await call.write(part)
            kv = "" if name is None else write_hold(HoldAt(parts.config.instance_id, self._host().address, name))
            finish = first.finish or FinishReason.LENGTH
            await call.write(messages.complete(finish, kv_transfer=kv))
        except BaseException:
            if request is not None:
                # The caller does not know of the hold.
                parts.holds.abort_request(asked.request_id)
                parts.prefill.cancel(request)
            raise
        return finish.value

    async def _decode(self, call: _LegCall, token_ids: tuple[int, ...], hold: HoldAt | None) -> str:
        asked = call.asked
        params = self._completed(asked.params, len(token_ids))
        if asked.n == 1:
            return await self._answer(call, 0, token_ids, params, hold)
        try:
            async with asyncio.TaskGroup() as group:
                # One hold is the KV of one answer.
                answers = [
                    group.create_task(self._answer(call, index, token_ids, params, hold if index == 0 else None))
                    for index in range(asked.n)
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return answers[0].result()

    async def _answer(
        self, call: _LegCall, index: int, token_ids: tuple[int, ...], params: ResolvedParams, hold: HoldAt | None
    ) -> str:
        asked = call.asked
        seeded = replace(params, seed=derived_seed(params.seed, index))
        request = LegRequest(asked.name(asked.request_id, index), token_ids, seeded, call.deadline_s, hold)
        messages = AnswerMessages(asked, index)
        stops = await self._stop_texts(token_ids, params)
        async with aclosing(self._parts.legs.answer(request)) as answer:
            async for drawn in answer:
                shown = drawn if stops is None else stops.cut(drawn)
                logprobs = list(map(logprobs_to_proto, shown.logprobs))
                part = messages.part(shown.token_ids, logprobs, len(token_ids))
                if part is not None:
                    await call.write(part)
                if shown.finish is not None:
                    stop_text = None if stops is None else stops.stop_text
                    await call.write(messages.complete(shown.finish, stop_text))
                    return shown.finish.value
        raise Unavailable("the answer has ended without a reason")

    def _completed(self, params: ResolvedParams, prompt_tokens: int) -> ResolvedParams:
        """With max_tokens and seed set. Raises InvalidArgument when they do not fit the model."""
        limit = self._parts.info.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            raise InvalidArgument("prompt", f"{prompt_tokens} tokens", f"at most {limit - 1} tokens")
        together = f"the prompt has {prompt_tokens} tokens, prompt and answer together at most {limit}"
        for name, tokens in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
            if tokens > room:
                raise InvalidArgument(f"params.{name}", tokens, f"at most {room}: {together}")
        return replace(
            params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
        )

    async def _prompt(self, asked: VllmAsked, deadline_s: float) -> tuple[int, ...]:
        info, prompt = self._parts.info, asked.prompt
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument("prompt", "", "at least one token long")
            tokenizer = await self._loaded_tokenizer()
            prompt = await tokenizer.encode(prompt, info.max_model_len - 1, deadline_s)
        if not 0 < len(prompt) < info.max_model_len:
            raise InvalidArgument("prompt", f"{len(prompt)} tokens", f"1 to {info.max_model_len - 1} tokens")
        info.require_known_ids(prompt, asked.params, "prompt")
        return tuple(prompt)

    async def _stop_texts(self, token_ids: Sequence[int], params: ResolvedParams) -> StopTexts | None:
        if not params.stop:
            return None
        tokenizer = await self._loaded_tokenizer()
        skips = params.skip_special_tokens
        return StopTexts(tokenizer.detokenizer(token_ids, params.stop, params.min_tokens, skip_special_tokens=skips))

    async def Abort(self, request: Any, context: LegContext) -> Any:  # noqa: N802
        try:
            request_ids = read_abort(request)
        except InvalidArgument as error:
            await abort(context, error)
        for request_id in request_ids:
            if (call := self._calls.get(request_id)) is not None:
                call.abort()
            self._parts.holds.abort_request(request_id)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: LegContext) -> Any:  # noqa: N802
        load = self._host().load()
        taken = [phase for phase in load.phases if phase not in load.ending_phases]
        message = "" if taken and load.state is InstanceState.READY else "this instance is draining, or serves no phase"
        return vllm_engine_pb2.HealthCheckResponse(healthy=not message, message=message)

    async def GetModelInfo(self, request: Any, context: LegContext) -> Any:  # noqa: N802
        config, info = self._parts.config, self._parts.info
        files = await self._model_files()
        limit = info.max_model_len
        largest = min(limit - 1, info.total_blocks * info.layout.block_tokens)
        try:
            defaults = parse_defaults(files.generation)
        except ConfigError as error:
            await abort(context, error)
        return model_info(config.model, config.model_name, limit, largest, info.vocab_size, files, defaults)

    async def GetServerInfo(self, request: Any, context: LegContext) -> Any:  # noqa: N802
        parts, load = self._parts, self._host().load()
        prefills, decodes = (parts.phases.is_ordered(phase) for phase in (Phase.PREFILL, Phase.DECODE))
        role = "kv_both" if prefills and decodes else "kv_producer" if prefills else "kv_consumer"
        layout = parts.info.layout
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=load.running_requests + load.waiting_requests,
            is_paused=load.state is not InstanceState.READY,
            uptime_seconds=time.monotonic() - self._started_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_connector=CONNECTOR,
            kv_role=role,
            kv_engine_id=parts.config.instance_id,
            block_size=layout.block_tokens,
            model_dtype=layout.dtype,
            # Keeps gateways from pairing an instance with a worker of another kind.
            pairing_protocol=f"kaveri-hold-{layout.model_fingerprint}",
        )

    async def GetLoads(self, request: Any, context: LegContext) -> Any:  # noqa: N802
        if request.dp_rank:
            await abort(context, InvalidArgument("dp_rank", request.dp_rank, "0, or left out: an instance is one rank"))
        load, block_tokens = self._host().load(), self._parts.info.layout.block_tokens
        total_tokens = load.total_blocks * block_tokens
        used_tokens = total_tokens - load.free_blocks * block_tokens
        shown = scheduler_load(
            load.running_requests, load.waiting_requests, used_tokens, total_tokens, load.queued_prefill_tokens
        )
        timestamp = datetime.now(UTC).isoformat()
        return vllm_engine_pb2.GetLoadsResponse(timestamp=timestamp, dp_rank_count=1, loads=[shown])

    async def GetTokenizer(self, request: Any, context: LegContext) -> None:  # noqa: N802
        files = await self._model_files()
        try:
            async with ReadLimit(self._parts.config.slow_reader_s) as limit:
                for chunk in tokenizer_chunks(files):
                    limit.begin()
                    await context.write(chunk)
                    limit.end()
        except (Unsupported, SlowReader) as error:
            await abort(context, error)

    async def _model_files(self) -> ModelFiles:
        async with self._reading:
            if self._files is None:
                self._files = await asyncio.to_thread(read_model_files, self._parts.config.model)
            return self._files

    async def _loaded_tokenizer(self) -> ModelTokenizer:
        """Gateways send token ids: most instances never load it."""
        async with self._reading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(ModelTokenizer.load, self._parts.config.model)
            return self._tokenizer
